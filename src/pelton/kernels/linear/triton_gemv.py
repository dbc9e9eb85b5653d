"""Product of one token's vector with a matrix: each program reads a few whole rows of the weight once.

Bound by memory, so the loop only loads, multiplies and adds; the sum over a row is taken at its end.
"""

import triton
import triton.language as tl

from pelton.kernels.gated_activation.triton_gated_activation import activate


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


@triton.jit
def gemv_gated(
    x,
    weight,
    bias,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    X_ROW: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``act(gate) * up`` of a weight with N gate rows, then N up rows: a program reads both of its rows."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    rows = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    inside = (n < N)[:, None]
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        mask = k < K - start
        v = tl.load(x + token * X_ROW + start + k, mask=mask, other=0.0).to(tl.float32)[None, :]
        w = tl.load(rows + start, mask=inside & mask[None, :], other=0.0).to(tl.float32)
        u = tl.load(rows + N * K + start, mask=inside & mask[None, :], other=0.0).to(tl.float32)
        gate += w * v
        up += u * v
    g = tl.sum(gate, 1)
    y = tl.sum(up, 1)
    if bias is not None:
        g += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        y += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)
    # Rounded as the product's own result would be.
    g = g.to(out.dtype.element_ty).to(tl.float32)
    y = y.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * N + n, (activate(g, KIND) * y).to(out.dtype.element_ty), mask=n < N)
