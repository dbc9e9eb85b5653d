"""Product of one token's vector with a matrix: each program reads a few whole rows of the weight once.

Bound by memory, so the loop only loads, multiplies and adds; the sum over a row is taken at its end.
"""

import triton
import triton.language as tl


@triton.jit
def gemv(
    x,
    weight,
    bias,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    X_ROW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    rows = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    inside = (n < N)[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        mask = k < K - start
        w = tl.load(rows + start, mask=inside & mask[None, :], other=0.0).to(tl.float32)
        v = tl.load(x + token * X_ROW + start + k, mask=mask, other=0.0).to(tl.float32)
        acc += w * v[None, :]
    y = tl.sum(acc, 1)
    if bias is not None:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + token * N + n, y.to(out.dtype.element_ty), mask=n < N)
