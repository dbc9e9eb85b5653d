"""Names of element types and quantised block types, without torch.

A *dtype* is dense ("float32", "bfloat16", ...). A *block type* is a quantised one: GGUF's ("q4_1", "q6_k",
...), or one of those that GPTQ, AWQ, compressed-tensors, fp8 and bitsandbytes checkpoints are read as
("int4_g128", "fp8_row", ...). A row is a header of ``header`` bytes, mostly none, and then a sequence of
blocks of ``block_size`` values, each stored in ``block_bytes`` bytes. ``quant`` fields hold a dtype or a
block type. What the bytes mean is in ``ir/blocks.py`` and ``ir/group_blocks.py``.
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
    "float8_e4m3fn": 1,
}

#: Element types of 8-bit codes, by the names that recipes have for them.
CODE_DTYPES = {"int8": "int8", "fp8": "float8_e4m3fn"}
#: Element types of a KV cache of 8 bits: codes with a scale a KV head.
KV_CODES = tuple(CODE_DTYPES.values())

#: Codes of the native library (``csrc/pelton.h``: ``pelton_dtype``).
NATIVE_CODE = {
    "float32": 0,
    "bfloat16": 1,
    "float16": 2,
    "int32": 3,
    "int8": 4,
    "uint8": 5,
    "int64": 6,
    "float8_e4m3fn": 7,
}


@dataclass(frozen=True)
class BlockType:
    """A quantised type: ``block_size`` values in ``block_bytes`` bytes, after ``header`` bytes a row."""

    name: str
    block_size: int
    block_bytes: int
    header: int = 0

    def row_bytes(self, cols: int) -> int:
        """Bytes of a row of ``cols`` values."""
        assert cols % self.block_size == 0, f"{cols} columns do not divide into {self.name} blocks"
        return self.header + cols // self.block_size * self.block_bytes


#: GGUF's types.
GGUF_BLOCK_TYPES = {
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

#: Values that share a scale, of the ``int<bits>_g<size>`` types.
GROUP_SIZES = (32, 64, 128)

#: The types of other quantisers' checkpoints and of Pelton's own algorithms.
GROUP_BLOCK_TYPES = {
    b.name: b
    for b in (
        # Unsigned codes with a scale (float16; float32 of 8-bit codes) and an integer zero point a group.
        *(
            BlockType(f"int{n}_g{g}", g, (5 if n == 8 else 3) + g * n // 8)
            for n in (2, 3, 4, 8)
            for g in GROUP_SIZES
        ),
        # One float32 scale a row (a tensor's scale is repeated), a byte a value.
        BlockType("int8_row", 1, 1, header=4),
        BlockType("fp8_row", 1, 1, header=4),
        # fp8 with a float32 scale for 128 columns: blocks of 128 x 128, their scale repeated in each row.
        BlockType("fp8_g128", 128, 132),
        # 4-bit codebooks: NF4 and FP4 (E2M1) with a float32 scale, NVFP4 with an e4m3 scale for 16 values
        # and a float32 one a row, MXFP4 with a power of two for 32.
        BlockType("nf4_g64", 64, 36),
        BlockType("fp4_g64", 64, 36),
        BlockType("nvfp4", 16, 9, header=4),
        BlockType("mxfp4", 32, 17),
    )
}

BLOCK_TYPES = GGUF_BLOCK_TYPES | GROUP_BLOCK_TYPES

#: Block types that the CPU's kernels read: kept bit for bit in its engines. Others are repacked at build.
NATIVE_BLOCK_TYPES = (
    *("q4_0", "q4_1", "q5_0", "q8_0", "q4_k", "q6_k"),
    *(f"int{n}_g{g}" for n in (4, 8) for g in GROUP_SIZES),
    "int8_row",
)

#: Block types that the GPU's kernels read: kept bit for bit in its engines. GGUF's others, q4_0 and q8_0, are
#: stored as integer groups that are equal.
GPU_BLOCK_TYPES = (
    *GROUP_BLOCK_TYPES,
    *("q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"),
)

#: Block types that kernels of some device read.
PACKED_TYPES = tuple(dict.fromkeys(NATIVE_BLOCK_TYPES + GPU_BLOCK_TYPES))


def is_dense(quant: str) -> bool:
    """True for plain element types, False for block types."""
    return quant in ITEMSIZE
