"""Products on tensor cores with the sums of a tile in float32 or float16."""

import triton
import triton.language as tl


@triton.jit
def dot(a, b, acc, HALF_SUMS: tl.constexpr):
    """``acc`` (float32) plus ``a`` (M, K) times ``b`` (K, N).

    ``HALF_SUMS``: the tile's own sums, of K products, are in float16, which tensor cores of GeForce cards add
    twice as fast; ``a`` and ``b`` are float16, and a sum above 65504 is infinite.
    """
    if HALF_SUMS:
        return acc + tl.dot(a, b, out_dtype=tl.float16).to(tl.float32)
    else:
        return tl.dot(a, b, acc, input_precision="ieee")
