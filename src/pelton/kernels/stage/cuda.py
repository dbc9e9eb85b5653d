"""The kernel of ``stage.cu``, which every engine for a GPU carries besides its plan's."""

from __future__ import annotations

import ctypes as C

from pelton.kernels.launch import CudaSource

#: Inputs of a step, at most: a KV group brings one.
SEGMENTS = 32
#: int32 numbers ahead of the values: how many pairs there are.
HEADER = 1
_THREADS = 256
#: Values of a program.
_BLOCK = _THREADS
#: Programs that pairs alone are worth.
_MOST = 64


class Segments(C.Structure):
    """The kernel's parameter: unused ones begin behind all values."""

    _fields_ = (("starts", C.c_int32 * SEGMENTS), ("shifts", C.c_int32 * SEGMENTS))


def stage_source() -> CudaSource:
    """``stage``: ``stage_programs`` of them."""
    return CudaSource(
        file="stage/stage.cu",
        function="stage",
        constants=(("SEGMENTS", SEGMENTS), ("THREADS", _THREADS)),
        threads=_THREADS,
        shared=0,
        dependent=True,
    )


def stage_programs(values: int, pairs: int) -> int:
    """Of a step with so many values, and at most so many pairs."""
    return -(-max(values, min(pairs, _MOST * _BLOCK)) // _BLOCK)
