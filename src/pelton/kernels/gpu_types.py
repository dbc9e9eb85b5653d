"""What GPU kernels must know of a block type in the layout ``mma16`` (``gpu_layouts.py``).

A value is ``d (q - z)``, or ``d q + m`` with an offset, or ``d (q - middle)``: one d for ``group`` columns.
The K types' d and m are integers of 8 bits times float16 numbers of 128 columns (``super_scales``).
"""

from __future__ import annotations

from dataclasses import dataclass

from pelton.dtypes import GROUP_BLOCK_TYPES

#: Columns that share the K types' float16 numbers in ``mma16``: a kernel's unit. In GGUF they are 256.
SUPER = 128


@dataclass(frozen=True, kw_only=True)
class GpuType:
    """How a block type is stored."""

    code: str
    """``u4``, ``u5``, ``u6``, ``u8``: unsigned, so many bits; ``s8`` (int8), ``e4m3``, ``e2m1``, ``nf4``."""
    scale: str
    """``float16``, ``float32``, ``e8m0``, ``e4m3`` (times a row's float32), ``int8`` (``super_scales``)."""
    group: int
    """Columns of a scale; 0: the row."""
    zero: bool = False
    """Whether a group has a zero point of 8 bits."""
    offset: bool = False
    """Whether a group has an offset, of the scale's type."""
    middle: int = 0
    """What every code is more than it means."""

    @property
    def super_scales(self) -> bool:
        return self.scale == "int8"

    @property
    def bits(self) -> int:
        """Of a code, as it lies in memory."""
        return int(self.code[1]) if self.code[0] == "u" else 4 if self.code in ("e2m1", "nf4") else 8

    @property
    def area_columns(self) -> int:
        """Columns of a scale area; 0: the row."""
        return SUPER if self.super_scales else self.group

    @property
    def area_bytes(self) -> int:
        """Bytes of 16 rows' scale area of a group, of ``SUPER`` columns or (``group`` 0) the row."""
        halves = 2 if self.offset else 1
        if self.super_scales:
            return 16 * halves * (2 + SUPER // self.group)
        width = {"float16": 2, "float32": 4}.get(self.scale, 1)
        return 16 * (halves * width + int(self.zero))


_GGUF = {
    "q4_1": GpuType(code="u4", scale="float16", group=32, offset=True),
    "q5_0": GpuType(code="u5", scale="float16", group=32, middle=16),
    "q5_1": GpuType(code="u5", scale="float16", group=32, offset=True),
    "q2_k": GpuType(code="u4", scale="int8", group=16, offset=True),
    "q3_k": GpuType(code="u4", scale="int8", group=16, middle=4),
    "q4_k": GpuType(code="u4", scale="int8", group=32, offset=True),
    "q5_k": GpuType(code="u5", scale="int8", group=32, offset=True),
    "q6_k": GpuType(code="u6", scale="int8", group=16, middle=32),
}
_OTHERS = {
    "int8_row": GpuType(code="s8", scale="float32", group=0),
    "fp8_row": GpuType(code="e4m3", scale="float32", group=0),
    "fp8_g128": GpuType(code="e4m3", scale="float32", group=128),
    "nf4_g64": GpuType(code="nf4", scale="float32", group=64),
    "fp4_g64": GpuType(code="e2m1", scale="float32", group=64),
    "nvfp4": GpuType(code="e2m1", scale="e4m3", group=16),
    "mxfp4": GpuType(code="e2m1", scale="e8m0", group=32),
}
#: By block type.
GPU_TYPES: dict[str, GpuType] = {
    **{
        name: GpuType(
            code="u8" if name.startswith("int8") else "u4",
            scale="float32" if name.startswith("int8") else "float16",
            group=block.block_size,
            zero=True,
        )
        for name, block in GROUP_BLOCK_TYPES.items()
        if name not in _OTHERS
    },
    **_OTHERS,
    **_GGUF,
}
