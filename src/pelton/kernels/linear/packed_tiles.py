"""Tiles of products with packed weights on GPUs, measured on an H200 (``h200_quant_kernels.py``)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pelton.dtypes import GGUF_BLOCK_TYPES, GROUP_BLOCK_TYPES
from pelton.kernels.gpu_layouts import PANEL, block_columns
from pelton.kernels.linear.tiles import PROCESSORS

#: Largest numbers of tokens that have tiles of their own.
PACKED_STEPS = (16, 32, 64, 128)


@dataclass(frozen=True)
class PackedTiles:
    """Tokens and panels of 16 rows (gated: of each half) of a tile; columns multiplied at a time, and how
    often in a turn of the loop; programs, loads in flight."""

    block_m: int
    panels: int
    unit: int
    units: int
    programs: int
    stages: int
    warps: int


def unit_columns(quant: str, wanted: int = 0) -> int:
    """Columns that the kernels multiply at a time: whole groups and blocks of codes, no group of 32 or more
    twice; ``wanted`` of them where a type has no such groups, or its weights are scaled."""
    size = 1 if quant in GGUF_BLOCK_TYPES else GROUP_BLOCK_TYPES[quant].block_size
    return max(size, block_columns(quant), wanted if size < 32 else 0)


def packed_tiles(n: int, k: int, tokens: int, gated: bool, itemsize: int, quant: str) -> PackedTiles:
    """For ``n`` results of each of up to ``tokens`` tokens; ``itemsize``: bytes of an element of theirs."""
    block_m = next((m for m in (16, 32, 64) if tokens <= m), 128)
    unit = unit_columns(quant, 128)
    share, stages = (
        (4 if unit_columns(quant) != 32 else 3, 4) if tokens <= 16 else (2, 4) if tokens <= 64 else (1, 3)
    )
    tiles = PackedTiles(block_m, 4, unit, 1, share * PROCESSORS, stages, 4)
    if itemsize == 4:
        tiles = replace(tiles, block_m=min(block_m, 32), unit=unit_columns(quant), units=1)
    return replace(tiles, programs=max(1, min(tiles.programs, _steps(tiles, n, k) // 2)))


def invariant_packed_tiles(n: int, itemsize: int, gated: bool, quant: str) -> PackedTiles:
    """One shape of tile for every step, a program each: a row's sum runs over its columns in one order."""
    unit = unit_columns(quant, 64)
    return PackedTiles(64 if itemsize == 2 else 32, 4, unit, 1, -(-n // (4 * PANEL)), 3, 4)


def _steps(tiles: PackedTiles, n: int, k: int) -> int:
    return -(-n // (PANEL * tiles.panels)) * -(-k // (tiles.unit * tiles.units))
