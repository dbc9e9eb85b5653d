"""The kernel of ``triton_stage.py``, which every engine for a GPU carries besides its plan's."""

from __future__ import annotations

from pelton.kernels.launch import KernelSource

#: Inputs of a step, at most: a KV group brings one.
SEGMENTS = 32
#: Values and pairs of a program.
BLOCK = 512


def stage_source() -> KernelSource:
    """``stage``: ``BLOCK`` values and pairs a program."""
    pointers = tuple((name, "*i32") for name in ("packed", "inputs", "sampled"))
    return KernelSource(
        module="pelton.kernels.stage.triton_stage",
        function="stage",
        types=(*pointers, ("n", "i32"), ("ids", "i32"), ("pairs", "i32")),
        constants=(("SEGMENTS", SEGMENTS), ("BLOCK", BLOCK)),
    )
