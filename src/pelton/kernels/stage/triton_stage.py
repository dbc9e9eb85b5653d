"""Lays a step's packed inputs out in the device's memory, reading them from page-locked host memory.

The buffer is int32: a header of ``2 * SEGMENTS`` numbers, the values of all inputs one after another, then
pairs. Segment s begins at value ``starts[s]`` and goes to the device ``shifts[s]`` places further on. A pair
is a place of the device's memory and what to put there: the entries of block tables that have changed. Token
ids below zero, of the first segment, stand for tokens that the step before has sampled: -1 for its row 0.
"""

import triton
import triton.language as tl


@triton.jit
def stage(packed, inputs, sampled, n, ids, pairs, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """``n`` values, of which the first ``ids`` are token ids, and ``pairs`` pairs."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.arange(0, SEGMENTS)
    starts = tl.load(packed + s)
    shifts = tl.load(packed + SEGMENTS + s)
    value = tl.load(packed + 2 * SEGMENTS + i, mask=i < n, other=0)
    waits = (value < 0) & (i < ids)
    # Where nothing could be sampled the result is dropped, and any token will do.
    value = tl.where(waits, tl.maximum(tl.load(sampled - value - 1, mask=waits, other=0), 0), value)
    # Shifts only grow with the segments: the last that has begun is the largest.
    shift = tl.max(tl.where(i[:, None] >= starts[None, :], shifts[None, :], 0), 1)
    tl.store(inputs + i + shift, value, mask=i < n)
    pair = packed + 2 * SEGMENTS + n + 2 * i
    place = tl.load(pair, mask=i < pairs, other=0)
    tl.store(inputs + place, tl.load(pair + 1, mask=i < pairs, other=0), mask=i < pairs)
