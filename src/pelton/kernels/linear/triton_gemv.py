"""Product of one token's vector with a matrix, bound by the memory that holds the matrix.

Persistent: a program takes every ``PROGRAMS``-th tile of ``BLOCK_N`` rows, and its loop runs over (tile,
columns), so that loads of the next tile are in flight while the last sums of one are taken. Optional parts:
the RMS norm of x before (``norm``: its sum of squares is taken on the way, the product scaled at the end), an
activation of gate rows times up rows (``KIND``), a bias and a residual after.
"""

import triton
import triton.language as tl

from pelton.kernels.gated_activation.triton_gated_activation import activate
from pelton.kernels.gpu.triton_dependent import gdc_launch_dependents, gdc_wait, prefetch


@triton.jit
def halves(word):
    """A 32-bit word of two bfloat16 -> both as float32, the lower first."""
    return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def pairs(pointer, at, mask, MASKED: tl.constexpr):
    """Elements 2 ``at`` and 2 ``at`` + 1 as float32; of bfloat16, in one load of a word.

    Whole words stay in registers through the loop, where a tile of bfloat16 would be taken apart and put
    together again.
    """
    if pointer.dtype.element_ty == tl.bfloat16:
        words = pointer.to(tl.pointer_type(tl.int32), bitcast=True) + at
        word = tl.load(words, mask=mask, other=0) if MASKED else tl.load(words)
        return halves(word)
    else:
        low = tl.load(pointer + 2 * at, mask=mask, other=0.0) if MASKED else tl.load(pointer + 2 * at)
        high = (
            tl.load(pointer + 2 * at + 1, mask=mask, other=0.0) if MASKED else tl.load(pointer + 2 * at + 1)
        )
        return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def gemv(
    x,
    weight,
    bias,
    residual,
    norm,
    out,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    X_ROW: tl.constexpr,
    R_ROW: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """``N`` results of a row; with ``KIND`` the weight has N gate rows, then N up rows. K is even.

    ``PREFETCH``: bytes of each of the first tile's rows that are read into L2 before the kernel waits.
    """
    pid = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    words: tl.constexpr = K // 2
    block: tl.constexpr = BLOCK_K // 2
    k_tiles: tl.constexpr = (words + block - 1) // block
    n_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    masked: tl.constexpr = words % block != 0
    rows = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, block)
    if DEPENDENT:
        gdc_launch_dependents()
        if PREFETCH > 0:
            first = weight + tl.minimum(pid * BLOCK_N + rows, N - 1).to(tl.int64) * K
            prefetch(first, PREFETCH)
            if KIND != "":
                prefetch(first + N * K, PREFETCH)
        gdc_wait()
    x += token * X_ROW
    steps = (n_tiles - pid + PROGRAMS - 1) // PROGRAMS * k_tiles
    acc = tl.zeros([BLOCK_N, block], tl.float32)
    up = tl.zeros([BLOCK_N, block], tl.float32)
    squares = tl.zeros([block], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        tile = pid + step // k_tiles * PROGRAMS
        column = step % k_tiles * block + columns
        inside = column < words
        # Clamped, not masked: what a row beyond the end computes is dropped at the store.
        n = tl.minimum(tile * BLOCK_N + rows, N - 1)
        at = n.to(tl.int64)[:, None] * words + column[None, :]
        x_low, x_high = pairs(x, column, inside, masked)
        w_low, w_high = pairs(weight, at, inside[None, :], masked)
        if norm is not None:
            if step < k_tiles:  # once, not again for every tile of rows
                squares += x_low * x_low + x_high * x_high
            g_low, g_high = pairs(norm, column, inside, masked)
            x_low *= g_low
            x_high *= g_high
        acc += w_low * x_low[None, :]
        acc += w_high * x_high[None, :]
        if KIND != "":
            u_low, u_high = pairs(weight, at + N * words, inside[None, :], masked)
            up += u_low * x_low[None, :]
            up += u_high * x_high[None, :]
        if step % k_tiles == k_tiles - 1:
            y = tl.sum(acc, 1)
            acc = tl.zeros([BLOCK_N, block], tl.float32)
            scale = 1.0
            if norm is not None:
                scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
                y *= scale
            if bias is not None:
                y += tl.load(bias + n).to(tl.float32)
            if KIND != "":
                u = tl.sum(up, 1)
                up = tl.zeros([BLOCK_N, block], tl.float32)
                if norm is not None:
                    u *= scale
                if bias is not None:
                    u += tl.load(bias + N + n).to(tl.float32)
                # Rounded as the product's own result would be.
                y = activate(y.to(out.dtype.element_ty).to(tl.float32), KIND)
                y *= u.to(out.dtype.element_ty).to(tl.float32)
            if residual is not None:
                y += tl.load(residual + token * R_ROW + n).to(tl.float32)
            inside_n = tile * BLOCK_N + rows < N
            tl.store(out + token * N + n, y.to(out.dtype.element_ty), mask=inside_n)
