"""rope_paged_attention in decode steps of a few sequences, for sm_90 alone (``hopper_decode.cu``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pelton.dtypes import KV_CODES
from pelton.kernels.launch import CallSpec, CudaBuilder, Term, Work, result_code, rows
from pelton.kernels.paged_attention import hopper
from pelton.kernels.rope_paged_attention import cuda
from pelton.kernels.tactic import SMALL_STEPS, NodeSpec, Tactic

FILE = "rope_paged_attention/hopper_decode.cu"
KEYS, ROWS = 16, 16
#: Values of the constant KV_CODE.
_CODES = {"int8": 1, "float8_e4m3fn": 2}
_attentions = {tactic.name: tactic for tactic in hopper.TACTICS}
#: What steps with prefills take, and every step of deterministic engines.
HOPPER = _attentions["cuda.paged_attention.hopper"]
INVARIANT = _attentions["cuda.paged_attention.hopper.invariant"]


@dataclass(frozen=True)
class Cluster:
    """Blocks that share a sequence's keys, tiles of 16 keys that a warp has under way, and warps."""

    blocks: int
    stages: int
    warps: int = 4


#: Sequences of the largest step in which clusters are faster than programs that meet in memory.
MOST = 32
#: (most sequences times KV heads, blocks that share one's keys); beyond: one.
_BLOCKS = ((16, 8), (32, 4), (128, 2))
#: Shared memory that a block of the product before leaves, bytes (``linear/hopper.py``): a block with no more
#: begins while that runs, so that its first keys are there when the queries come.
_ROOM = 112 << 10


def cluster(largest: int, kv_heads: int, group: int, dim: int) -> Cluster:
    """For steps of at most ``largest`` sequences (0: any); measured on an H200, beside a step's products
    (``benchmarks/h200_step.py``)."""
    groups = largest * kv_heads
    blocks = next((n for most, n in _BLOCKS if 0 < groups <= most), 1)
    three = Cluster(blocks, 3)
    return three if shared_bytes(three, group, dim) <= _ROOM else Cluster(blocks, 2)


def shared_bytes(how: Cluster, group: int, dim: int) -> int:
    """What ``hopper_decode_parts.cuh`` lays out."""
    pairs, parts = -(-group // 2), how.blocks * how.warps
    tiles = how.warps * how.stages * 2 * KEYS * dim * 2
    return tiles + parts * (8 * pairs * dim // how.blocks + 32 + 16 * pairs) + 64 + 4 * dim + 8


def decode(call: CallSpec, how: Cluster) -> tuple[Work, ...]:
    """The launch for a step in which every sequence has one token."""
    q, k, v, cos_sin, k_cache = (call.input(i) for i in range(5))
    k_scale, v_scale, *rounding = call.inputs[12:16]
    dim, kv_heads = int(q.shape[2]), int(k.shape[1])
    group = int(q.shape[1]) // kv_heads
    weights = call.inputs[10], call.inputs[11]
    softcap = float(call.attrs["softcap"])
    shifted = all(rounding)
    b = CudaBuilder(call, FILE, "decode")
    for index in (0, 1, 2, 3, 4, 5, 6, 7, 9):
        b.input(index)
    for index, operand in enumerate((*weights, k_scale, v_scale), 10):
        b.input(index if operand else 0)  # where it is absent, not read
    if shifted:
        b.input(14).input(15)
    b.output().number(float(call.attrs["eps"])).number(float(call.attrs["scale"])).number(softcap)
    b.number(float(call.attrs.get("y_scale") or 0.0))
    sinks = call.inputs[16] is not None
    if sinks:
        b.input(16)
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
            "SINKS": int(sinks),
            "HALF": int(q.dtype == "float16"),
            "NORM_Q": int(weights[0] is not None),
            "NORM_K": int(weights[1] is not None),
            "KV_CODE": _CODES.get(k_cache.dtype, 0),
            "K_SCALED": int(k_scale is not None),
            "V_SCALED": int(v_scale is not None),
            "SHIFTED": int(shifted),
            "WEIGHTS32": int(any(w is not None and w.dtype == "float32" for w in weights)),
            "RESULT_CODE": result_code(call),
            "CLUSTER": how.blocks,
            "WARPS": how.warps,
            "STAGES": how.stages,
        },
        threads=32 * (how.warps + 1),
        shared=shared_bytes(how, group, dim),
        dependent=True,
    )
    return (spec,)


def fits(call: CallSpec) -> bool:
    """Whether the cluster's kernel takes the call, whose attention the tactic of prefills takes."""
    q, k, v, cos_sin, k_cache = (call.input(i) for i in range(5))
    kinds, rounding = {w.dtype for w in call.inputs[10:12] if w is not None}, call.inputs[14:16]
    sinks = call.inputs[16]
    return (
        int(q.shape[1]) // int(k.shape[1]) <= ROWS
        and q.dtype == k.dtype
        and (k_cache.dtype == q.dtype or (k_cache.dtype in KV_CODES and q.dtype != "float32"))
        and (not any(rounding) or (all(rounding) and k_cache.dtype in KV_CODES))
        and (kinds <= {"float32"} or kinds <= {q.dtype})
        and (sinks is None or sinks.dtype == "float32")
        # Heads are read, and rotate, by 8 elements.
        and int(cos_sin.shape[1]) // 2 % 8 == 0
        and all(stride % 8 == 0 for operand in (q, k, v) for stride in operand.strides[:2])
    )


def _decode(largest: int) -> Callable[[CallSpec, int], tuple[Work, ...]]:
    def launches(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
        heads, kv_heads, dim = int(call.input(0).shape[1]), *map(int, call.input(1).shape[1:])
        if (0 < largest <= MOST or call.input(4).dtype in KV_CODES) and fits(call):
            return decode(call, cluster(largest, kv_heads, heads // kv_heads, dim))
        return cuda.decode(call, cuda.decode_tiles(largest, kv_heads, call.input(4).dtype), largest)

    return launches


def _supports(largest: int, attention: Tactic) -> Callable[[NodeSpec], bool]:
    general = cuda.supports(largest)
    return lambda node: general(node) and attention.supports(cuda.attention_of(attention, node))


def _supports_codes(largest: int) -> Callable[[NodeSpec], bool]:
    general = cuda.supports(largest)

    def takes(node: NodeSpec) -> bool:
        q, k_cache = node.inputs[0], node.inputs[4]
        assert q is not None
        assert k_cache is not None
        kv_heads, page, dim = map(int, k_cache.shape[1:])
        return (
            general(node)
            and k_cache.dtype in KV_CODES
            and q.dtype in ("bfloat16", "float16")
            and dim in (64, 128)
            and page in (8, 16, 32, 64, 128)
            and int(q.shape[1]) // kv_heads <= ROWS
        )

    return takes


TACTICS = [
    *(
        Tactic(
            name=f"cuda.rope_paged_attention.hopper8.{largest or 'any'}",
            op="rope_paged_attention",
            device="cuda",
            supports=_supports_codes(largest),
            priority=25 if largest else 15,
            precision="bfloat16",
            largest_tokens=largest,
            workspace=cuda.workspace(largest, cuda.ATTENTION),
            sm=90,
            launches=cuda.separately(cuda.ATTENTION),
            decode=_decode(largest),
        )
        for largest in cuda.LARGEST
    ),
    *(
        Tactic(
            name=f"cuda.rope_paged_attention.hopper.{largest or 'any'}",
            op="rope_paged_attention",
            device="cuda",
            supports=_supports(largest, HOPPER),
            priority=25 if largest else 15,
            precision="bfloat16",
            largest_tokens=largest,
            workspace=cuda.workspace(largest, HOPPER),
            sm=90,
            launches=cuda.separately(HOPPER),
            decode=_decode(largest),
        )
        for largest in cuda.LARGEST
    ),
    Tactic(
        name="cuda.rope_paged_attention.hopper8.half_sums",
        op="rope_paged_attention",
        device="cuda",
        supports=lambda node: _supports_codes(0)(node) and cuda.supports_half_sums(node),
        priority=71,
        precision="float16_sums",
        sums="float16",
        above=SMALL_STEPS,
        workspace=cuda.workspace(0, cuda.HALF_SUMS),
        sm=90,
        launches=cuda.separately(cuda.HALF_SUMS),
        decode=_decode(0),
    ),
    Tactic(
        name="cuda.rope_paged_attention.hopper.invariant",
        op="rope_paged_attention",
        device="cuda",
        supports=_supports(0, INVARIANT),
        priority=1,
        precision="bfloat16",
        batch_invariant=True,
        workspace=cuda.workspace(0, INVARIANT),
        sm=90,
        launches=cuda.separately(INVARIANT),
    ),
]
