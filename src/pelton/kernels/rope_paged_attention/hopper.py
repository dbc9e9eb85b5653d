"""rope_paged_attention in decode steps of a few sequences, for sm_90 alone (``hopper_decode.cu``)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from pelton.kernels import launch
from pelton.kernels.launch import CallSpec, CudaBuilder, CudaSource, Term, Work, rows
from pelton.kernels.rope_paged_attention import cuda
from pelton.kernels.tactic import NodeSpec, Tactic, gpu_caches

FILE = "rope_paged_attention/hopper_decode.cu"
WARPS, KEYS, ROWS = 4, 16, 16


@dataclass(frozen=True)
class Cluster:
    """Blocks that share a sequence's keys, and tiles of 16 keys that a warp has under way."""

    blocks: int
    stages: int


#: Sequences of the largest step of a tactic.
LARGEST = (1, 2, 4, 8, 16)
#: Blocks that are enough to fill a GPU.
_ENOUGH = 256


def cluster(largest: int, kv_heads: int) -> Cluster:
    """For steps of at most ``largest`` sequences; measured on an H200
    (``benchmarks/h200_decode_attention.py``)."""
    blocks = 8
    while blocks > 1 and blocks * largest * kv_heads > _ENOUGH:
        blocks //= 2
    return Cluster(blocks, 3)


def decode(call: CallSpec, how: Cluster) -> tuple[Work, ...]:
    """The launch for a step in which every sequence has one token."""
    q, k, v, cos_sin, k_cache = (call.input(i) for i in range(5))
    dim, kv_heads = int(q.shape[2]), int(k.shape[1])
    group = int(q.shape[1]) // kv_heads
    weights = call.inputs[10], call.inputs[11]
    softcap = float(call.attrs["softcap"])
    b = CudaBuilder(call, FILE, "decode")
    for index in (0, 1, 2, 3, 4, 5, 6, 7, 9):
        b.input(index)
    for index, weight in zip((10, 11), weights, strict=True):
        b.input(index if weight else 0)  # where it is absent, not read
    b.output().number(float(call.attrs["eps"])).number(float(call.attrs["scale"])).number(softcap)
    tile = KEYS * dim * 2
    shared = WARPS * how.stages * 2 * tile + 3 * tile + 4 * group * dim + 8 * ROWS * (1 + WARPS)
    spec = b.launch(
        (Term(times=how.blocks),),
        (Term(times=kv_heads),),
        (rows(q),),
        constants={
            "KV_HEADS": kv_heads,
            "GROUP": group,
            "D": dim,
            "TURN": int(cos_sin.shape[1]) // 2,
            "PAGE": int(k_cache.shape[2]),
            "COLUMNS": int(call.input(7).shape[1]),
            "Q_ROW": q.strides[0],
            "K_ROW": k.strides[0],
            "V_ROW": v.strides[0],
            "Q_HEAD": q.strides[1],
            "K_HEAD": k.strides[1],
            "V_HEAD": v.strides[1],
            "WINDOW": int(call.attrs["window"]),
            "SOFTCAP": int(softcap > 0),
            "HALF": int(q.dtype == "float16"),
            "NORM_Q": int(weights[0] is not None),
            "NORM_K": int(weights[1] is not None),
            "WEIGHTS32": int(any(w is not None and w.dtype == "float32" for w in weights)),
            "CLUSTER": how.blocks,
            "STAGES": how.stages,
        },
        threads=32 * WARPS,
        shared=shared,
    )
    assert isinstance(spec.kernel, CudaSource)
    return (replace(spec, kernel=replace(spec.kernel, dependent=launch.OVERLAP)),)


def _supports(node: NodeSpec) -> bool:
    q, k, v, _, k_cache = node.inputs[:5]
    weights = [w for w in node.inputs[10:12] if w is not None]
    assert q is not None and k is not None and v is not None and k_cache is not None
    kinds = {w.quant or w.dtype for w in weights}
    return (
        gpu_caches(node, 4, 5)
        and {q.dtype, k.dtype, v.dtype} == {k_cache.dtype}
        and q.dtype in ("bfloat16", "float16")
        and int(k_cache.shape[3]) in (64, 128)
        and int(k_cache.shape[2]) in (8, 16, 32, 64, 128)
        and int(q.shape[1]) // int(k.shape[1]) <= ROWS
        and (kinds <= {"float32"} or kinds <= {q.dtype})
    )


def _decode(largest: int) -> Callable[[CallSpec, int], tuple[Work, ...]]:
    return lambda call, max_tokens: decode(call, cluster(largest, int(call.input(1).shape[1])))


TACTICS = [
    Tactic(
        name=f"cuda.rope_paged_attention.hopper.{largest}",
        op="rope_paged_attention",
        device="cuda",
        supports=_supports,
        priority=5,  # not before it has run on such a GPU
        precision="bfloat16",
        largest_tokens=largest,
        workspace=functools.partial(cuda.attention_bytes, cuda.ATTENTION),
        sm=90,
        launches=cuda.separately(cuda.ATTENTION),
        decode=_decode(largest),
    )
    for largest in LARGEST
]
