"""Names of element types and quantised block types, without torch.

A *dtype* is dense ("float32", "bfloat16", ...). A *block type* is one of GGUF's quantised types
("q4_1", "q6_k", ...): a row is a sequence of blocks of ``block_size`` values, each stored in
``block_bytes`` bytes. ``quant`` fields hold either.
"""

from __future__ import annotations

from dataclasses import dataclass

ITEMSIZE = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
}

#: Codes of the native library (``csrc/pelton.h``: ``pelton_dtype``).
NATIVE_CODE = {
    "float32": 0,
    "bfloat16": 1,
    "float16": 2,
    "int32": 3,
    "int8": 4,
    "uint8": 5,
    "int64": 6,
}


@dataclass(frozen=True)
class BlockType:
    """One of GGUF's quantised types: ``block_size`` values in ``block_bytes`` bytes."""

    name: str
    block_size: int
    block_bytes: int


BLOCK_TYPES = {
    b.name: b
    for b in (
        BlockType("q4_0", 32, 18),
        BlockType("q4_1", 32, 20),
        BlockType("q5_0", 32, 22),
        BlockType("q5_1", 32, 24),
        BlockType("q8_0", 32, 34),
        BlockType("q2_k", 256, 84),
        BlockType("q3_k", 256, 110),
        BlockType("q4_k", 256, 144),
        BlockType("q5_k", 256, 176),
        BlockType("q6_k", 256, 210),
    )
}

#: Block types with native kernels: kept bit for bit in an engine. Others are repacked at build.
NATIVE_BLOCK_TYPES = ("q4_0", "q4_1", "q5_0", "q8_0", "q4_k", "q6_k")


def is_dense(quant: str) -> bool:
    """True for plain element types, False for block types."""
    return quant in ITEMSIZE
