"""kv_write on NVIDIA GPUs (``triton_kv_write.py``)."""

from __future__ import annotations

from pelton.kernels.launch import Builder, CallSpec, LaunchSpec, Term, power_of_two, rows
from pelton.kernels.tactic import NodeSpec, Tactic, gpu_caches

MODULE = "pelton.kernels.kv_write.triton_kv_write"


def launches(call: CallSpec, max_tokens: int) -> tuple[LaunchSpec, ...]:
    k, v, cache = call.input(0), call.input(1), call.input(2)
    heads, dim = int(k.shape[1]), int(k.shape[2])
    b = Builder(call, MODULE, "kv_write")
    for index, name in enumerate(("k", "v", "k_cache", "v_cache", "slots")):
        b.input(name, index)
    b.input("k_scale", 5).input("v_scale", 6).input("k_shift", 7).input("k_queries", 8)
    b.constants(HEADS=heads, D=dim, PAGE=int(cache.shape[2]), BLOCK=power_of_two(dim))
    b.constants(K_ROW=k.strides[0], V_ROW=v.strides[0], K_HEAD=k.strides[1], V_HEAD=v.strides[1])
    return (b.launch((rows(k),), (Term(times=heads),), num_warps=1),)


def _supports(node: NodeSpec) -> bool:
    return gpu_caches(node, 2, 3, codes=True)


TACTICS = [
    Tactic(
        name="cuda.kv_write",
        op="kv_write",
        device="cuda",
        supports=_supports,
        precision="bfloat16",
        batch_invariant=True,
        launches=launches,
    )
]
