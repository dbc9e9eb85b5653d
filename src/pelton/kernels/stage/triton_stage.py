"""Lays a step's packed inputs out in the device's memory, reading them from page-locked host memory.

The buffer is int32: a header of ``HEADER`` numbers, the values of all inputs one after another, then pairs.
The header says how many pairs there are, and of each segment s the value it begins with, ``starts[s]``, and
that it goes to the device ``shifts[s]`` places further on. A pair is a place of the device's memory and what
to put there: the entries of block tables that have changed. Token ids below zero, of the first segment, stand
for tokens that the step before has sampled: -1 for its row 0.

So all that changes between steps of one size is in the buffer, and a graph can have the launch.
"""

import triton
import triton.language as tl

from pelton.kernels.gpu.triton_dependent import gdc_launch_dependents, gdc_wait


@triton.jit
def stage(
    packed,
    inputs,
    sampled,
    n,
    ids,
    SEGMENTS: tl.constexpr,
    HEADER: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """``n`` values, of which the first ``ids`` are token ids, a ``BLOCK`` of them a program."""
    if DEPENDENT:
        gdc_launch_dependents()
    # All of these are on their way at once: the host's memory is a microsecond away.
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.arange(0, SEGMENTS)
    pairs = tl.load(packed)
    starts = tl.load(packed + HEADER - 2 * SEGMENTS + s)
    shifts = tl.load(packed + HEADER - SEGMENTS + s)
    value = tl.load(packed + HEADER + i, mask=i < n, other=0)
    if DEPENDENT:
        gdc_wait()
    waits = (value < 0) & (i < ids)
    # Where nothing could be sampled the result is dropped, and any token will do.
    value = tl.where(waits, tl.maximum(tl.load(sampled - value - 1, mask=waits, other=0), 0), value)
    # Shifts only grow with the segments: the last that has begun is the largest.
    shift = tl.max(tl.where(i[:, None] >= starts[None, :], shifts[None, :], 0), 1)
    tl.store(inputs + i + shift, value, mask=i < n)
    for first in range(tl.program_id(0) * BLOCK, pairs, tl.num_programs(0) * BLOCK):
        j = first + tl.arange(0, BLOCK)
        pair = packed + HEADER + n + 2 * j
        place = tl.load(pair, mask=j < pairs, other=0)
        tl.store(inputs + place, tl.load(pair + 1, mask=j < pairs, other=0), mask=j < pairs)
