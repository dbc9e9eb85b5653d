"""Paged attention on NVIDIA GPUs (``triton_attention.py``).

A step of prefills takes large tiles of queries. Where every sequence has one token a tile holds the query
heads of one KV head, and with few sequences several programs share the keys of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pelton.dtypes import ITEMSIZE
from pelton.ir.float16_sums import KEYS
from pelton.kernels.launch import Builder, CallSpec, Term, Work, power_of_two, rows
from pelton.kernels.tactic import SMALL_STEPS, NodeSpec, Tactic, gpu_caches, no_codes

MODULE = "pelton.kernels.paged_attention.triton_attention"
#: (most sequences, programs that share a sequence's keys).
SPLITS = ((4, 16), (8, 8), (16, 4), (32, 2))


@dataclass(frozen=True)
class Tiles:
    """Rows of scores (tokens times heads of a group), keys at a time, programs sharing the keys."""

    rows: int
    keys: int
    splits: int
    stages: int
    warps: int


def _supports(node: NodeSpec) -> bool:
    return gpu_caches(node, 1, 2, codes=True)


def supports_half_sums(node: NodeSpec) -> bool:
    """Queries in float16."""
    q = node.inputs[0]
    return _supports(node) and no_codes(node) and q is not None and q.dtype == "float16"


def attention(
    call: CallSpec, tiles: Tiles, tokens: int, *, invariant: bool = False, half_sums: bool = False
) -> tuple[Work, ...]:
    """The launches for a step of at most ``tokens`` tokens (they size the parts to combine).

    ``half_sums``: scores, and a tile's sums of values, are in float16, as q.
    """
    q, k_cache, table = call.input(0), call.input(1), call.input(3)
    heads, dim = int(q.shape[1]), int(q.shape[2])
    group = heads // int(k_cache.shape[1])
    block_q = max(1, tiles.rows // group)
    b = Builder(call, MODULE, "attention")
    for index, name in enumerate(("q", "k_cache", "v_cache", "block_table", "cu_seqlens", "seq_lens")):
        b.input(name, index)
    b.input("k_scale", 6).input("v_scale", 7).output("out")
    if tiles.splits == 1:
        b.input("sinks", 8)
    else:  # they join the whole softmax, not its parts
        b.constants(sinks=None)
    parts = _parts(tokens, heads, tiles.splits)
    for name, offset in parts.items():
        if tiles.splits > 1:
            b.workspace(name, offset)
        else:
            b.constants(**{name: None})
    softcap = float(call.attrs["softcap"])
    b.dim("sequences", table.shape[0]).number("scale", float(call.attrs["scale"])).number("softcap", softcap)
    result_scale(b, call)
    b.constants(HEADS=heads, GROUP=group, D=dim, PAGE=int(k_cache.shape[2]), COLUMNS=int(table.shape[1]))
    b.constants(Q_ROW=q.strides[0], Q_HEAD=q.strides[1], WINDOW=int(call.attrs["window"]))
    b.constants(SOFTCAP=softcap > 0, BLOCK_Q=block_q, BLOCK_M=max(16, power_of_two(block_q * group)))
    b.constants(BLOCK_N=tiles.keys, BLOCK_D=max(16, power_of_two(dim)), SPLITS=tiles.splits)
    b.constants(STAGES=tiles.stages, UNMASKED=not invariant, HALF_SUMS=half_sums)
    whole = b.launch(
        (rows(q, block_q), rows(table)),
        (Term(times=heads // group),),
        (Term(times=tiles.splits),),
        num_warps=tiles.warps,
    )
    if tiles.splits == 1:
        return (whole,)
    c = Builder(call, MODULE, "combine").output("out")
    for name, offset in parts.items():
        c.workspace(name, offset)
    c.input("sinks", 8)
    result_scale(c, call)
    c.constants(HEADS=heads, D=dim, BLOCK_D=max(16, power_of_two(dim)), SPLITS=tiles.splits)
    return whole, c.launch((rows(q),), (Term(times=heads),), num_warps=2)


def result_scale(b: Builder, call: CallSpec) -> None:
    """Of a result that is codes; else None."""
    scale = call.attrs.get("y_scale")
    if scale is None:
        b.constants(y_scale=None)
    else:
        b.number("y_scale", float(scale))


def _parts(tokens: int, heads: int, splits: int) -> dict[str, int]:
    """Offsets of the partial results in the workspace, bytes."""
    n = tokens * heads * splits * 4
    n += -n % 16
    return {"partial": 2 * n, "partial_max": 0, "partial_sum": n}


def prefill_tiles(dim: int, itemsize: int = 2) -> Tiles:
    """By the size of a head; measured on an H200 (``benchmarks/h200_kernels.py``).

    Tiles of elements of 4 bytes are small enough for the shared memory of every GPU.
    """
    if itemsize == 4:
        return _wide_tiles(dim)
    return Tiles(128, 128, 1, 3, 8) if dim <= 128 else Tiles(64, 32, 1, 2, 4)


def _half_sums(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
    tiles = replace(prefill_tiles(int(call.input(0).shape[2])), keys=KEYS)
    return attention(call, tiles, max_tokens, half_sums=True)


def _wide_tiles(dim: int) -> Tiles:
    return Tiles(64, 32, 1, 2, 4) if dim <= 128 else Tiles(32, 16, 1, 2, 4)


def _itemsize(call: CallSpec) -> int:
    """Bytes of the larger of a query's and a key's elements."""
    return max(ITEMSIZE[call.input(0).dtype], ITEMSIZE[call.input(1).dtype])


def decode_tiles(dim: int, splits: int) -> Tiles:
    """By the size of a head; measured on an H200 (``benchmarks/h200_kernels.py``)."""
    return Tiles(1, 64 if dim <= 128 else 32, splits, 2, 4)


def _prefill(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
    return attention(call, prefill_tiles(int(call.input(0).shape[2]), _itemsize(call)), max_tokens)


def decode_launches(splits: int) -> Callable[[CallSpec, int], tuple[Work, ...]]:
    """Those of decode steps, with ``splits`` programs sharing a sequence's keys."""

    def launches(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
        return attention(call, decode_tiles(int(call.input(0).shape[2]), splits), max_tokens)

    return launches


def _part_bytes(largest: int, splits: int) -> Callable[[NodeSpec, int], int]:
    def nbytes(node: NodeSpec, max_tokens: int) -> int:
        q = node.inputs[0]
        assert q is not None
        return min(max_tokens, largest) * int(q.shape[1]) * splits * (int(q.shape[2]) + 2) * 4 + 64

    return nbytes


def _invariant(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
    # One shape of tile for every step: a query's sum runs over its keys in one order.
    dim = int(call.input(0).shape[2])
    tiles = _wide_tiles(dim) if _itemsize(call) == 4 else Tiles(64, 64 if dim <= 128 else 32, 1, 2, 4)
    return attention(call, tiles, max_tokens, invariant=True)


TACTICS = [
    *(
        Tactic(
            name=f"cuda.paged_attention.split{splits}",
            op="paged_attention",
            device="cuda",
            supports=_supports,
            priority=20,
            precision="bfloat16",
            largest_tokens=largest,
            workspace=_part_bytes(largest, splits),
            launches=_prefill,
            decode=decode_launches(splits),
        )
        for largest, splits in SPLITS
    ),
    Tactic(
        name="cuda.paged_attention",
        op="paged_attention",
        device="cuda",
        supports=_supports,
        priority=10,
        precision="bfloat16",
        launches=_prefill,
        decode=decode_launches(1),
    ),
    Tactic(
        name="cuda.paged_attention.invariant",
        op="paged_attention",
        device="cuda",
        supports=_supports,
        priority=0,
        precision="bfloat16",
        batch_invariant=True,
        launches=_invariant,
    ),
    Tactic(
        name="cuda.paged_attention.half_sums",
        op="paged_attention",
        device="cuda",
        supports=supports_half_sums,
        priority=70,
        precision="float16_sums",
        sums="float16",
        above=SMALL_STEPS,
        launches=_half_sums,
        decode=decode_launches(1),
    ),
]
