"""The kernel of ``triton_stage.py``, which every engine for a GPU carries besides its plan's."""

from __future__ import annotations

from pelton.kernels.launch import KernelSource

#: Inputs of a step, at most: a KV group brings one.
SEGMENTS = 32
#: int32 numbers ahead of the values: how many pairs there are, and (at a multiple of 128 bytes) segments.
HEADER = 32 + 2 * SEGMENTS
#: Values of a program, and pairs at a time.
BLOCK = 512
#: Programs that pairs alone are worth.
_MOST = 32


def stage_source() -> KernelSource:
    """``stage``: ``stage_programs`` of them."""
    pointers = tuple((name, "*i32") for name in ("packed", "inputs", "sampled"))
    return KernelSource(
        module="pelton.kernels.stage.triton_stage",
        function="stage",
        types=(*pointers, ("n", "i32"), ("ids", "i32")),
        constants=(("SEGMENTS", SEGMENTS), ("HEADER", HEADER), ("BLOCK", BLOCK), ("DEPENDENT", False)),
        dependent=True,
    )


def stage_programs(values: int, pairs: int) -> int:
    """Of a step with so many values, and at most so many pairs."""
    return -(-max(values, min(pairs, _MOST * BLOCK)) // BLOCK)
