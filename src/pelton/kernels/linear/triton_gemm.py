"""Matrix products for many tokens, where cuBLASLt cannot: with a bias, of two types, with sums in float16."""

import triton
import triton.language as tl

from pelton.kernels.gpu.triton_sums import dot
from pelton.kernels.linear.triton_stream import finish


@triton.jit
def gemm(
    x,
    weight,
    bias,
    residual,
    out,
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    X_ROW: tl.constexpr,
    R_ROW: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    HALF_SUMS: tl.constexpr,
):
    """As ``stream``, a tile a program; in groups of ``GROUP`` tiles of tokens, so that neighbouring programs
    share weights in L2. With ``HALF_SUMS`` the sums of ``BLOCK_K`` columns are in float16."""
    pid = tl.program_id(0)
    m_tiles = tl.cdiv(tokens, BLOCK_M)
    n_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    group = pid // (GROUP * n_tiles)
    first = group * GROUP
    size = tl.minimum(m_tiles - first, GROUP)
    m = (first + (pid % (GROUP * n_tiles)) % size) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (pid % (GROUP * n_tiles)) // size * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_rows = x + tl.minimum(m, tokens - 1).to(tl.int64)[None, :] * X_ROW + k[:, None]
    w_rows = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            v = tl.load(x_rows + start)
            w = tl.load(w_rows + start)
        else:
            v = tl.load(x_rows + start, mask=(k < K - start)[:, None], other=0.0)
            w = tl.load(w_rows + start, mask=(k < K - start)[None, :], other=0.0)
        acc = dot(w.to(v.dtype), v, acc, HALF_SUMS)
        if KIND != "":
            if K % BLOCK_K == 0:
                u = tl.load(w_rows + N * K + start)
            else:
                u = tl.load(w_rows + N * K + start, mask=(k < K - start)[None, :], other=0.0)
            up = dot(u.to(v.dtype), v, up, HALF_SUMS)
    finish(acc, up, bias, residual, out, n, m, tokens, N, R_ROW, KIND)
