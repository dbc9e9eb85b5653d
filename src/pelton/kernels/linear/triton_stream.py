"""Matrix products on tensor cores for a few to some hundred tokens, their work dealt out evenly ("stream-K").

The units of work are (tile of weight rows, tile of columns); each of ``PROGRAMS`` programs takes an equal run
of them, in order, so that all multiprocessors end together whatever the shape, and its loads run on from
tile to tile. A tile that several programs share is summed by the last of them to finish, in the order of
its columns: the result does not depend on which that is. After Osama et al., "Stream-K" (2023).
"""

import triton
import triton.language as tl

from pelton.kernels.gated_activation.triton_gated_activation import activate
from pelton.kernels.gpu.triton_dependent import gdc_launch_dependents, gdc_wait, prefetch


@triton.jit
def finish(
    acc,
    up,
    bias,
    residual,
    out,
    n,
    m,
    tokens,
    N: tl.constexpr,
    R_ROW: tl.constexpr,
    KIND: tl.constexpr,
):
    """Bias, activation and residual of a tile's sums (rows of the weight, tokens), and its store."""
    inside = (m < tokens)[None, :] & (n < N)[:, None]
    if bias is not None:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if KIND != "":
        if bias is not None:
            up += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        # Rounded as the product's own result would be.
        acc = activate(acc.to(out.dtype.element_ty).to(tl.float32), KIND)
        acc *= up.to(out.dtype.element_ty).to(tl.float32)
    if residual is not None:
        at = residual + m.to(tl.int64)[None, :] * R_ROW + n[:, None]
        acc += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    at = out + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def stream(
    x,
    weight,
    bias,
    residual,
    out,
    partial,
    counters,
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    X_ROW: tl.constexpr,
    R_ROW: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """``N`` results of each of up to ``BLOCK_M`` tokens a program of the grid's second axis.

    With ``KIND`` the weight has N gate rows, then N up rows, and the result is ``act(gate) * up``. Rows of
    the weight are the tensor core's M operand, since there are more of them than tokens. ``PREFETCH``: bytes
    of each of the first tile's rows that are read into L2 before the kernel waits.
    """
    pid = tl.program_id(0)
    n_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    k_tiles: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    units: tl.constexpr = n_tiles * k_tiles
    whole: tl.constexpr = units % PROGRAMS == 0 and units // PROGRAMS % k_tiles == 0
    first = pid * units // PROGRAMS
    last = (pid + 1) * units // PROGRAMS
    rows = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    if DEPENDENT:
        gdc_launch_dependents()
        if PREFETCH > 0:
            row = tl.minimum(first // k_tiles * BLOCK_N + rows, N - 1).to(tl.int64)
            ahead: tl.constexpr = PREFETCH * 8 // weight.dtype.element_ty.primitive_bitwidth
            head = weight + row * K + tl.minimum(first % k_tiles * BLOCK_K, K - ahead)
            prefetch(head, PREFETCH)
            if KIND != "":
                prefetch(head + N * K, PREFETCH)
        gdc_wait()
    # Clamped, not masked: what a row beyond the end computes is dropped at the store.
    x_rows = x + tl.minimum(m, tokens - 1).to(tl.int64)[None, :] * X_ROW
    # A program meets two shared tiles at most: where its run begins, and where it ends.
    size: tl.constexpr = BLOCK_N * BLOCK_M * (2 if KIND != "" else 1)
    parts = partial
    if not whole:
        inner = rows[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        parts = partial + tl.program_id(1).to(tl.int64) * (2 * PROGRAMS * size) + inner
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for unit in tl.range(first, last, num_stages=STAGES):
        tile = unit // k_tiles
        column = unit % k_tiles * BLOCK_K + columns
        n = tile * BLOCK_N + rows
        w_at = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + column[None, :]
        if K % BLOCK_K == 0:
            v = tl.load(x_rows + column[:, None])
            w = tl.load(w_at)
        else:
            v = tl.load(x_rows + column[:, None], mask=(column < K)[:, None], other=0.0)
            w = tl.load(w_at, mask=(column < K)[None, :], other=0.0)
        acc = tl.dot(w.to(v.dtype), v, acc, input_precision="ieee")
        if KIND != "":
            if K % BLOCK_K == 0:
                u = tl.load(w_at + N * K)
            else:
                u = tl.load(w_at + N * K, mask=(column < K)[None, :], other=0.0)
            up = tl.dot(u.to(v.dtype), v, up, input_precision="ieee")
        if (unit % k_tiles == k_tiles - 1) | (unit == last - 1):
            begin = tile * k_tiles
            if whole or (first <= begin) & (last >= begin + k_tiles):
                finish(acc, up, bias, residual, out, n, m, tokens, N, R_ROW, KIND)
            else:
                part = parts + (2 * pid + (begin > first).to(tl.int32)) * size
                tl.store(part, acc)
                if KIND != "":
                    tl.store(part + BLOCK_N * BLOCK_M, up)
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if not whole:
        # Counted after the loop, since a barrier in it would keep its loads from running ahead.
        tl.debug_barrier()
        for end in tl.static_range(2):
            tile = first // k_tiles if end == 0 else (last - 1) // k_tiles
            begin = tile * k_tiles
            shared = (first > begin) | (last < begin + k_tiles)
            if shared & ((end == 0) | (begin > first)):
                # The programs whose runs meet this tile.
                low = ((begin + 1) * PROGRAMS - 1) // units
                high = ((begin + k_tiles) * PROGRAMS - 1) // units
                counter = counters + tl.program_id(1) * n_tiles + tile
                if tl.atomic_add(counter, 1, sem="acq_rel") == high - low:
                    tl.store(counter, 0)
                    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                    for p in range(low, high + 1):
                        part = parts + (2 * p + (begin > p * units // PROGRAMS).to(tl.int32)) * size
                        acc += tl.load(part, cache_modifier=".cg")
                        if KIND != "":
                            up += tl.load(part + BLOCK_N * BLOCK_M, cache_modifier=".cg")
                    n = tile * BLOCK_N + rows
                    finish(acc, up, bias, residual, out, n, m, tokens, N, R_ROW, KIND)
