"""rope_kv_write on NVIDIA GPUs (``triton_rope_kv_write.py``)."""

from __future__ import annotations

from pelton.kernels.launch import Builder, CallSpec, LaunchSpec, Term, power_of_two, rows
from pelton.kernels.tactic import NodeSpec, Tactic, gpu_caches

#: Heads that a program handles.
HEADS = 4
MODULE = "pelton.kernels.rope_kv_write.triton_rope_kv_write"


def launches(call: CallSpec, max_tokens: int) -> tuple[LaunchSpec, ...]:
    q, k, v, cos_sin, k_cache = (call.input(i) for i in range(5))
    dim = int(q.shape[2])
    heads, kv_heads = int(q.shape[1]), int(k.shape[1])
    b = Builder(call, MODULE, "rope_kv_write")
    for index, name in enumerate(("q", "k", "v", "cos_sin", "k_cache", "v_cache", "slots")):
        b.input(name, index)
    b.input("q_weight", 7).input("k_weight", 8).input("k_scale", 9).input("v_scale", 10)
    b.input("k_shift", 11).input("k_queries", 12)
    b.output("out").number("eps", float(call.attrs["eps"]))
    b.constants(Q_HEADS=heads, KV_HEADS=kv_heads, D=dim, HALF=int(cos_sin.shape[1]) // 2)
    b.constants(PAGE=int(k_cache.shape[2]), Q_ROW=q.strides[0], K_ROW=k.strides[0], V_ROW=v.strides[0])
    b.constants(Q_HEAD=q.strides[1], K_HEAD=k.strides[1], V_HEAD=v.strides[1], BLOCK=power_of_two(dim))
    b.constants(HEADS=HEADS)
    parts = -(-heads // HEADS) + -(-kv_heads // HEADS)
    return (b.launch((rows(q),), (Term(times=parts),), num_warps=2),)


def _supports(node: NodeSpec) -> bool:
    return gpu_caches(node, 4, 5, codes=True)


TACTICS = [
    Tactic(
        name="cuda.rope_kv_write",
        op="rope_kv_write",
        device="cuda",
        supports=_supports,
        precision="bfloat16",
        batch_invariant=True,
        launches=launches,
    )
]
