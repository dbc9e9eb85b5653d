"""Tiles of the GPU's matrix products by shape, measured on an H200 (``benchmarks/h200_kernels.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

#: Multiprocessors that a product is spread over; an H200 has 132.
PROCESSORS = 132


@dataclass(frozen=True)
class GemvTiles:
    """Rows of the weight and columns at a time, programs at most, loads in flight."""

    block_n: int
    block_k: int
    programs: int
    stages: int
    warps: int


def gemv_tiles(n: int, k: int, gated: bool, normed: bool) -> GemvTiles:
    """For ``n`` results of one token. Gated, a result takes two rows of the weight.

    Three programs a multiprocessor, as many as their ``launch.FOOTPRINT`` lets there be. Normed, the norm's
    weight is read for every tile of rows: taller ones read it less often.
    """
    block_n = 8 if normed and not gated else 4
    return GemvTiles(block_n, 1024 if k >= 1024 else 256, 3 * PROCESSORS, 4 if not normed else 3, 4)


#: Bytes of a row that are read into L2 before a program of one token's product waits.
GEMV_PREFETCH = 1024


@dataclass(frozen=True)
class StreamTiles:
    """Tokens, rows of the weight (gated: of each half) and columns at a time; programs, loads in flight."""

    block_m: int
    block_n: int
    block_k: int
    programs: int
    stages: int
    warps: int


def stream_tiles(n: int, k: int, tokens: int, gated: bool, itemsize: int) -> StreamTiles:
    """For ``n`` results of each of up to ``tokens`` tokens.

    ``itemsize``: bytes of an element; tiles of 4-byte ones are narrower, to fit into shared memory.
    """
    tiles = _stream_tiles(n, k, tokens, gated)
    units = -(-n // tiles.block_n) * -(-k // tiles.block_k)
    tiles = replace(tiles, programs=max(1, min(tiles.programs, units // 2)))
    return tiles if itemsize == 2 else replace(tiles, block_k=tiles.block_k // 4)


def _stream_tiles(n: int, k: int, tokens: int, gated: bool) -> StreamTiles:
    block_m = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    if tokens <= 16:
        return StreamTiles(block_m, 32 if gated else 64, 128, 2 * PROCESSORS, 4, 4)
    return StreamTiles(block_m, 64 if gated else 128, 64, PROCESSORS, 5, 4)


def invariant_tiles(n: int, itemsize: int, gated: bool) -> StreamTiles:
    """One shape of tile for every step, a program each: a row's sum runs over its columns in one order."""
    block_n = 32 if gated else 64
    return StreamTiles(64, block_n, 64 if itemsize == 2 else 32, -(-n // block_n), 3, 4)


@dataclass(frozen=True)
class HopperTiles:
    """How ``hopper_rows.cuh`` takes a product (its constants of the same names say more).

    ``tokens`` (8, 16) and ``rows`` of the weight at a time; ``boxes`` of 64 columns (of 8-bit codes 128) that
    are copied together; ``warps`` that multiply, in ``splits``.
    """

    tokens: int
    rows: int
    boxes: int
    warps: int
    splits: int


def hopper_tiles(n: int, tokens: int, gated: bool) -> HopperTiles:
    """For ``n`` results of each of up to ``tokens`` tokens on an sm_90: a tile of rows for every
    multiprocessor where that is not too tall."""
    tall = -(-(2 * n if gated else n) // (16 * PROCESSORS))  # in sixteens
    if tall <= 3:  # short: the warps share columns, not rows
        return HopperTiles(tokens, 16 * tall, 4 if tokens == 8 else 2, 8, 8)
    if tokens == 8:
        return HopperTiles(8, 32, 4, 8, 8)
    if tall > 16:
        return HopperTiles(tokens, 128, 1, 8, 1)
    each = 1 if tall <= 8 else 2
    warps = -(-tall // each)
    return HopperTiles(tokens, 16 * each * warps, 1, warps, 1)


#: Rows of the weight, in sixteens, that a warp takes at most.
_TALLEST_8 = 7
#: Of short tiles, boxes that are copied together where there are so many columns.
_LONG, _BOXES_LONG = 1 << 13, 4


def rows8_tiles(n: int, k: int, tokens: int, gated: bool) -> Iterator[HopperTiles]:
    """The same where the weight is 8-bit codes, best first: what a warp does to x is the dearer the fewer
    rows it is for, copies of a few KiB are slow, and few tiles are dealt out unevenly."""
    tall = -(-(2 * n if gated else n) // (16 * PROCESSORS))  # sixteens of a multiprocessor
    turns = -(-tall // _TALLEST_8)
    for boxes in (*((_BOXES_LONG,) if k >= _LONG and tall <= 2 else ()), 2, 1):
        yield HopperTiles(tokens, 16 * -(-tall // turns), boxes, 8, 8)
    for turns in range(-(-tall // (2 * _TALLEST_8)), tall + 1):
        yield HopperTiles(tokens, 32 * -(-tall // (2 * turns)), 1, 8, 4)
