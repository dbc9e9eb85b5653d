"""Matrix products on tensor cores, for a few tokens (``skinny``) and for many (``gemm``)."""

import triton
import triton.language as tl

from pelton.kernels.gated_activation.triton_gated_activation import activate


@triton.jit
def skinny(
    x,
    weight,
    bias,
    out,
    partial,
    counters,
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    X_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rows of the weight are the tensor core's M operand, since there are more of them than tokens.

    With ``SPLIT`` > 1 as many programs share a tile's columns of the weight; the last to finish adds the
    parts, in their order, so that the result does not depend on which that is.
    """
    n_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    k = tl.arange(0, BLOCK_K)
    share: tl.constexpr = (K + BLOCK_K * SPLIT - 1) // (BLOCK_K * SPLIT) * BLOCK_K
    # Clamped, not masked: what a row beyond the end computes is dropped at the store.
    w_rows = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    x_rows = x + tl.minimum(m, tokens - 1).to(tl.int64)[None, :] * X_ROW + k[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(split * share, tl.minimum(split * share + share, K), BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            w = tl.load(w_rows + start)
            v = tl.load(x_rows + start)
        else:
            w = tl.load(w_rows + start, mask=(k < K - start)[None, :], other=0.0)
            v = tl.load(x_rows + start, mask=(k < K - start)[:, None], other=0.0)
        acc = tl.dot(w.to(v.dtype), v, acc, input_precision="ieee")
    if SPLIT > 1:
        tile = tl.program_id(1) * n_tiles + tl.program_id(0)
        inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        parts = partial + tile.to(tl.int64) * (SPLIT * BLOCK_N * BLOCK_M) + inner
        tl.store(parts + split * (BLOCK_N * BLOCK_M), acc)
        tl.debug_barrier()
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") < SPLIT - 1:
            return
        tl.store(counters + tile, 0)
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for i in tl.static_range(SPLIT):
            acc += tl.load(parts + i * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
    if bias is not None:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    at = out + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(m < tokens)[None, :] & (n < N)[:, None])


@triton.jit
def skinny_gated(
    x,
    weight,
    bias,
    out,
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    X_ROW: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``act(gate) * up`` of a weight with N gate rows, then N up rows, for a few tokens."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    w_rows = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    x_rows = x + tl.minimum(m, tokens - 1).to(tl.int64)[None, :] * X_ROW + k[:, None]
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            v = tl.load(x_rows + start)
            w = tl.load(w_rows + start)
            u = tl.load(w_rows + N * K + start)
        else:
            v = tl.load(x_rows + start, mask=(k < K - start)[:, None], other=0.0)
            w = tl.load(w_rows + start, mask=(k < K - start)[None, :], other=0.0)
            u = tl.load(w_rows + N * K + start, mask=(k < K - start)[None, :], other=0.0)
        gate = tl.dot(w.to(v.dtype), v, gate, input_precision="ieee")
        up = tl.dot(u.to(v.dtype), v, up, input_precision="ieee")
    if bias is not None:
        gate += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    # Rounded as the product's own result would be.
    g = gate.to(out.dtype.element_ty).to(tl.float32)
    y = activate(g, KIND) * up.to(out.dtype.element_ty).to(tl.float32)
    at = out + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(at, y.to(out.dtype.element_ty), mask=(m < tokens)[None, :] & (n < N)[:, None])


@triton.jit
def gemm(
    x,
    weight,
    bias,
    out,
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    X_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Tiles in groups of ``GROUP`` token tiles, so that neighbouring programs share weights in L2."""
    pid = tl.program_id(0)
    m_tiles = tl.cdiv(tokens, BLOCK_M)
    n_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    group = pid // (GROUP * n_tiles)
    first = group * GROUP
    size = tl.minimum(m_tiles - first, GROUP)
    m_tile = first + (pid % (GROUP * n_tiles)) % size
    n_tile = (pid % (GROUP * n_tiles)) // size
    m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_rows = x + tl.minimum(m, tokens - 1).to(tl.int64)[:, None] * X_ROW + k[None, :]
    w_rows = weight + tl.minimum(n, N - 1).to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            v = tl.load(x_rows + start)
            w = tl.load(w_rows + start)
        else:
            v = tl.load(x_rows + start, mask=(k < K - start)[None, :], other=0.0)
            w = tl.load(w_rows + start, mask=(k < K - start)[:, None], other=0.0)
        acc = tl.dot(v, w.to(v.dtype), acc, input_precision="ieee")
    if bias is not None:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at = out + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(m < tokens)[:, None] & (n < N)[None, :])
