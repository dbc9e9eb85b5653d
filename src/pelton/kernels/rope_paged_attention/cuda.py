"""rope_paged_attention on NVIDIA GPUs: one kernel in decode steps (``triton_decode.py``), else two.

In other steps rope_kv_write's kernel leaves the rotated q where the result goes, and paged_attention's
takes it from there: a program of it reads the rows that it alone writes. Where the result is codes, the
rotated q is in the workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from pelton.dtypes import ITEMSIZE, KV_CODES
from pelton.kernels.launch import (
    COUNTERS,
    Argument,
    Builder,
    CallSpec,
    OperandSpec,
    Term,
    Work,
    on_behalf,
    power_of_two,
    rows,
)
from pelton.kernels.launch import workspace as workspace_at
from pelton.kernels.paged_attention import cuda as paged_attention
from pelton.kernels.rope_kv_write import cuda as rope_kv_write
from pelton.kernels.tactic import SMALL_STEPS, NodeSpec, Tactic, TensorSpec, gpu_caches

MODULE = "pelton.kernels.rope_paged_attention.triton_decode"

#: Where the parts' operands stand among the op's.
_WRITE = (0, 1, 2, 3, 4, 5, 6, 10, 11, 12, 13, 14, 15)
_ATTEND = (4, 5, 7, 8, 9, 12, 13, 16)


_attentions = {tactic.name: tactic for tactic in paged_attention.TACTICS}
ATTENTION = _attentions["cuda.paged_attention"]
HALF_SUMS = _attentions["cuda.paged_attention.half_sums"]
_INVARIANT = _attentions["cuda.paged_attention.invariant"]


@dataclass(frozen=True)
class Decode:
    """How a decode step's keys are dealt out."""

    splits: int
    """Programs that share a sequence's keys, at most."""
    least: int
    """Keys of a program, at least."""
    keys: int
    """Keys at a time, of heads of up to 128; half as many of larger ones."""
    stages: int
    warps: int


#: Sequences of the largest step of a tactic; 0: any.
LARGEST = (1, 2, 4, 8, 16, 32, 0)
#: Programs that are enough to fill a GPU, and that may share a sequence's keys.
_ENOUGH, _MOST = 512, 32


def decode_tiles(largest: int, kv_heads: int, kv_dtype: str) -> Decode:
    """For steps of at most ``largest`` sequences (0: any); measured on an H200
    (``benchmarks/h200_decode_attention.py``)."""
    splits = min(_MOST, max(1, _ENOUGH // (largest * kv_heads))) if largest else 1
    # As many bytes under way where keys have half of them, except where programs are many.
    return Decode(splits, 32, 32 if kv_dtype in KV_CODES and largest else 16, 5, 1)


def decode(call: CallSpec, how: Decode, sequences: int) -> tuple[Work, ...]:
    """The launch for a step of at most so many sequences, each with one token."""
    q, k, v, cos_sin, k_cache = (call.input(i) for i in range(5))
    heads, dim = int(q.shape[1]), int(q.shape[2])
    kv_heads, page = int(k.shape[1]), int(k_cache.shape[2])
    group, block_d = heads // kv_heads, max(16, power_of_two(dim))
    group_rows = max(16, power_of_two(group))
    keys = how.keys if dim <= 128 else max(16, how.keys // 2)
    warps = max(how.warps, group_rows // 16, block_d // 128)
    b = Builder(call, MODULE, "decode")
    for index, name in enumerate(("q", "k", "v", "cos_sin", "k_cache", "v_cache", "slots", "block_table")):
        b.input(name, index)
    b.input("seq_lens", 9).input("q_weight", 10).input("k_weight", 11).input("k_scale", 12)
    b.input("v_scale", 13).input("k_shift", 14).input("k_queries", 15).input("sinks", 16).output("out")
    if how.splits > 1:
        b.counters("counters")
        for name, offset in _parts(sequences, heads, how.splits).items():
            b.workspace(name, offset)
    else:
        b.constants(counters=None, partial=None, partial_max=None, partial_sum=None)
    for name in ("eps", "scale", "softcap"):
        b.number(name, float(call.attrs[name]))
    paged_attention.result_scale(b, call)
    b.integer("splits", how.splits).integer("least", -(-how.least // keys))
    b.constants(KV_HEADS=kv_heads, GROUP=group, D=dim, HALF=int(cos_sin.shape[1]) // 2, PAGE=page)
    b.constants(COLUMNS=int(call.input(7).shape[1]), Q_ROW=q.strides[0], K_ROW=k.strides[0])
    b.constants(V_ROW=v.strides[0], Q_HEAD=q.strides[1], K_HEAD=k.strides[1], V_HEAD=v.strides[1])
    b.constants(WINDOW=int(call.attrs["window"]), SOFTCAP=float(call.attrs["softcap"]) > 0)
    b.constants(ROWS=group_rows, GROUP_ROWS=power_of_two(group), BLOCK_N=keys, BLOCK_D=block_d)
    b.constants(SHARED=how.splits > 1, JOIN=_joined(warps, power_of_two(group) * block_d))
    b.constants(STAGES=how.stages)
    grid = (Term(times=kv_heads),), (Term(times=how.splits),), (rows(q),)
    return (b.launch(*grid, num_warps=warps),)


def _tiles(largest: int, k_cache: OperandSpec | TensorSpec | None) -> Decode:
    assert k_cache is not None
    return decode_tiles(largest, int(k_cache.shape[1]), k_cache.dtype)


def _joined(warps: int, values: int) -> int:
    """Parts of so many values that fit into the registers of a program at a time."""
    return max(1, power_of_two(warps * 32 * 128 // values + 1) // 2)


def _parts(sequences: int, heads: int, splits: int) -> Mapping[str, int]:
    """Offsets of the partial results in the workspace, bytes."""
    n = sequences * heads * splits * 4
    n += -n % 16
    return {"partial": 2 * n, "partial_max": 0, "partial_sum": n}


def workspace(largest: int, attention: Tactic) -> Callable[[NodeSpec, int], int]:
    """Of decode steps of at most ``largest`` sequences, and of others with the tactic ``attention``."""

    def nbytes(node: NodeSpec, max_tokens: int) -> int:
        q = node.inputs[0]
        assert q is not None
        heads, dim, splits = int(q.shape[1]), int(q.shape[2]), _tiles(largest, node.inputs[4]).splits
        parts = _parts(largest, heads, splits)["partial"] + largest * heads * splits * dim * 4
        others = attention.workspace(attention_of(attention, node), max_tokens)
        if node.attrs.get("y_codes"):
            others += 256 + max_tokens * heads * dim * ITEMSIZE[q.dtype]
        return max(parts if splits > 1 else 0, others)

    return nbytes


def separately(attention: Tactic) -> Callable[[CallSpec, int], tuple[Work, ...]]:
    """Both parts by their own kernels, the second as in any step of the tactic ``attention``."""

    def launches(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
        out = call.outputs[0]
        codes = call.attrs.get("y_codes") is not None
        rotated = replace(out, dtype=call.input(0).dtype)
        write = CallSpec(
            inputs=tuple(call.inputs[i] for i in _WRITE), outputs=(rotated,), attrs={"eps": call.attrs["eps"]}
        )
        attend = CallSpec(
            inputs=(rotated, *(call.inputs[i] for i in _ATTEND)),
            outputs=(out,),
            attrs={name: value for name, value in call.attrs.items() if name != "eps"},
        )
        assert attention.launches is not None
        result = Argument("output")
        between = workspace_at(_behind(attention, attend, max_tokens)) if codes else result
        return (
            *on_behalf(rope_kv_write.launches(write, max_tokens), [_input(i) for i in _WRITE], [between]),
            *on_behalf(
                attention.launches(attend, max_tokens), [between, *(_input(i) for i in _ATTEND)], [result]
            ),
        )

    return launches


def _behind(attention: Tactic, attend: CallSpec, max_tokens: int) -> int:
    """Where the workspace is free of ``attention``'s, bytes."""
    inputs = tuple(
        None if o is None else TensorSpec(dtype=o.dtype, shape=o.shape, quant=o.quant) for o in attend.inputs
    )
    node = NodeSpec(op=attention.op, inputs=inputs, attrs=attend.attrs)
    return -(-attention.workspace(node, max_tokens) // 256) * 256


def _input(index: int) -> Argument:
    return Argument("input", index=index)


def attention_of(attention: Tactic, node: NodeSpec) -> NodeSpec:
    """The second part as the tactic ``attention`` would see its node."""
    inputs = node.inputs[0], *(node.inputs[i] for i in _ATTEND)
    return NodeSpec(op=attention.op, inputs=inputs, attrs=node.attrs)


def supports(largest: int) -> Callable[[NodeSpec], bool]:
    """Of steps of at most ``largest`` sequences: there must be a counter for each and KV head."""

    def takes(node: NodeSpec) -> bool:
        k = node.inputs[1]
        assert k is not None
        return gpu_caches(node, 4, 5, codes=True) and largest * int(k.shape[1]) <= COUNTERS

    return takes


def supports_half_sums(node: NodeSpec) -> bool:
    """As the second part says."""
    return supports(0)(node) and HALF_SUMS.supports(attention_of(HALF_SUMS, node))


def _decode(largest: int) -> Callable[[CallSpec, int], tuple[Work, ...]]:
    return lambda call, max_tokens: decode(call, _tiles(largest, call.inputs[4]), largest)


TACTICS = [
    *(
        Tactic(
            name=f"cuda.rope_paged_attention.{largest or 'any'}",
            op="rope_paged_attention",
            device="cuda",
            supports=supports(largest),
            priority=20 if largest else 10,
            precision="bfloat16",
            largest_tokens=largest,
            workspace=workspace(largest, ATTENTION),
            launches=separately(ATTENTION),
            decode=_decode(largest),
        )
        for largest in LARGEST
    ),
    Tactic(
        name="cuda.rope_paged_attention.invariant",
        op="rope_paged_attention",
        device="cuda",
        supports=supports(0),
        priority=0,
        precision="bfloat16",
        batch_invariant=True,
        workspace=workspace(0, _INVARIANT),
        launches=separately(_INVARIANT),
    ),
    Tactic(
        name="cuda.rope_paged_attention.half_sums",
        op="rope_paged_attention",
        device="cuda",
        supports=supports_half_sums,
        priority=70,
        precision="float16_sums",
        sums="float16",
        above=SMALL_STEPS,
        workspace=workspace(0, HALF_SUMS),
        launches=separately(HALF_SUMS),
        decode=_decode(0),
    ),
]
