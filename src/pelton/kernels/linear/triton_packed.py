"""Products with quantised weights in the layout ``mma16`` (``gpu_layouts.py``), on tensor cores.

A tile of codes is loaded as the lanes of a warp need it, decoded where it lands, and multiplied from there:
weights never pass through shared memory as numbers. Rows of the weight are the tensor core's M operand. A
group's sum is scaled at its end; of NVFP4, whose groups are a product's 16 columns, and of GGUF's types the
weights are scaled.
"""

import triton
import triton.language as tl

from pelton.kernels.gpu.triton_dependent import gdc_launch_dependents, gdc_wait, prefetch
from pelton.kernels.linear.triton_decode import decode4, decode8, less_zero
from pelton.kernels.linear.triton_gguf import gguf_halves
from pelton.kernels.linear.triton_stream import finish


@triton.jit
def tile_of(codes, P: tl.constexpr, KB: tl.constexpr):
    """(KB, P, 32, 16) bytes of ``KB`` blocks and ``P`` panels -> (16 P, 32 KB) by rows and columns."""
    wide = codes.reshape(KB, P, 8, 4, 2, 2, 2, 2)  # block, panel, g, q, s, c, h, e
    return wide.permute(1, 6, 2, 0, 4, 5, 3, 7).reshape(P * 16, KB * 32)


@triton.jit
def load_scales(area, r, SCALE: tl.constexpr):
    """Scale ``r`` of those at the addresses ``area``, as float32."""
    if SCALE == "float16":
        return tl.load((area + r * 2).to(tl.pointer_type(tl.float16), bitcast=True)).to(tl.float32)
    elif SCALE == "float32":
        return tl.load((area + r * 4).to(tl.pointer_type(tl.float32), bitcast=True))
    elif SCALE == "e8m0":
        s = tl.load(area + r).to(tl.int32)
        # 2^-127 is no normal number.
        return tl.where(s == 0, 5.877471754111438e-39, (s << 23).to(tl.float32, bitcast=True))
    else:
        return decode8(tl.load(area + r), "e4m3", tl.float32)


@triton.jit
def scales_of(area, SCALE: tl.constexpr, P: tl.constexpr):
    """``area``: (P) addresses of 16 scales each -> (16 P) float32."""
    return load_scales(area[:, None], tl.arange(0, 16)[None, :], SCALE).reshape(P * 16)


@triton.jit
def _fine(codes, area, first, BLOCKS: tl.constexpr, P: tl.constexpr, KB: tl.constexpr, T: tl.constexpr):
    """Decoded ``codes`` (KB, P, 32, 16) from block ``first`` on times their scales of 16 columns, 64 a block.

    Products of so few bits are exact in bfloat16.
    """
    kb = tl.minimum(first + tl.arange(0, KB), BLOCKS - 1)
    g, s, h = tl.arange(0, 8), tl.arange(0, 2), tl.arange(0, 2)
    at = area[None, :, None, None, None] + kb[:, None, None, None, None] * 64
    at += g[None, None, :, None, None] + s[None, None, None, :, None] * 16 + h[None, None, None, None, :] * 8
    scales = decode8(tl.load(at), "e4m3", T).reshape(KB, P, 8, 1, 2, 1, 2, 1)
    return (codes.reshape(KB, P, 8, 4, 2, 2, 2, 2) * scales).reshape(KB, P, 32, 16)


@triton.jit
def group_area(
    panels,
    column,
    K: tl.constexpr,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
):
    """(P) addresses of the scales of the group of ``column``, which may lie beyond the end."""
    COLS: tl.constexpr = 32 if CODE == "u8" or CODE == "s8" or CODE == "e4m3" else 64
    BLOCKS: tl.constexpr = (K + COLS - 1) // COLS
    WIDTH: tl.constexpr = 2 if SCALE == "float16" else 4 if SCALE == "float32" else 1
    AREA: tl.constexpr = 16 * (WIDTH + 1) if ZERO else 16 * WIDTH
    return panels + BLOCKS * 512 + tl.minimum(column // GROUP, BLOCKS * COLS // GROUP - 1) * AREA


@triton.jit
def _less_zeros(
    codes, area, CODE: tl.constexpr, SCALE: tl.constexpr, ZERO: tl.constexpr, P: tl.constexpr, T: tl.constexpr
):
    """``codes`` (16 P, columns) of a group less its zero points, which follow its scales."""
    if ZERO:
        at: tl.constexpr = 32 if SCALE == "float16" else 64
        z = tl.load(area[:, None] + at + tl.arange(0, 16)[None, :]).reshape(P * 16)
        return less_zero(codes, z, CODE, T)
    else:
        return codes


@triton.jit
def _codes(
    panels, start, K: tl.constexpr, UNIT: tl.constexpr, MASK: tl.constexpr, P: tl.constexpr,
    CODE: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """As ``decoded``, of all but GGUF's types."""
    EIGHT: tl.constexpr = CODE == "u8" or CODE == "s8" or CODE == "e4m3"
    COLS: tl.constexpr = 32 if EIGHT else 64
    KB: tl.constexpr = UNIT // COLS
    BLOCKS: tl.constexpr = (K + COLS - 1) // COLS
    kb = tl.arange(0, KB)[:, None, None, None]
    lane = tl.arange(0, 32)[None, None, :, None]
    byte = tl.arange(0, 16)[None, None, None, :]
    first = start // COLS
    at = panels[None, :, None, None] + first * 512 + (kb * 512 + lane * 16 + byte)
    if MASK:
        codes = tl.load(at, mask=first + kb < BLOCKS, other=0)
    else:
        codes = tl.load(at)
    if EIGHT:
        w = tile_of(decode8(codes, CODE, T), P, KB)
        if GROUP > 0:
            w = _less_zeros(
                w, group_area(panels, start, K, CODE, SCALE, GROUP, ZERO), CODE, SCALE, ZERO, P, T
            )
        return w, w
    else:
        low, high = decode4(codes, CODE, T)
        if GROUP == 16:
            fine = panels + BLOCKS * 512 + 64
            low = _fine(low, fine, first, BLOCKS, P, KB, T)
            high = _fine(high, fine + 32, first, BLOCKS, P, KB, T)
        low, high = tile_of(low, P, KB), tile_of(high, P, KB)
        if GROUP > 16:
            area = group_area(panels, start, K, CODE, SCALE, GROUP, ZERO)
            low = _less_zeros(low, area, CODE, SCALE, ZERO, P, T)
            if GROUP == 32:
                area = group_area(panels, start + 32, K, CODE, SCALE, GROUP, ZERO)
            high = _less_zeros(high, area, CODE, SCALE, ZERO, P, T)
        return low, high


@triton.jit
def decoded(
    panels,
    start,
    K: tl.constexpr,
    UNIT: tl.constexpr,
    MASK: tl.constexpr,
    P: tl.constexpr,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    T: tl.constexpr,
):
    """Columns ``start`` to ``start + UNIT`` of ``panels`` (P addresses) as ``T``, without the scales of rows
    and of groups of 32 and more, but of GGUF's types.

    8-bit codes: the columns, twice; others: (16 P, UNIT / 2) of the first and of the second 32 of each 64.
    """
    GGUF: tl.constexpr = SCALE == "d" or SCALE == "dm" or SCALE == "k" or SCALE == "km"
    if GGUF:
        KB: tl.constexpr = UNIT // 64
        low, high = gguf_halves(panels, start // 64, (K + 63) // 64, MASK, P, KB, CODE, SCALE, GROUP, T)
        return tile_of(low, P, KB), tile_of(high, P, KB)
    else:
        return _codes(panels, start, K, UNIT, MASK, P, CODE, SCALE, GROUP, ZERO, T)


@triton.jit
def unit(
    acc,
    panels,
    x_rows,
    start,
    K: tl.constexpr,
    UNIT: tl.constexpr,
    MASK: tl.constexpr,
    P: tl.constexpr,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
):
    """``acc`` (16 P, tokens) plus the product over columns ``start`` to ``start + UNIT``: one group or, of
    4-bit codes with groups of 32, two; of row types, groups of 16 and GGUF's types any number.

    ``panels``: (P) addresses of panels; ``x_rows``: (tokens) addresses of the tokens' rows.
    """
    T: tl.constexpr = x_rows.dtype.element_ty
    EIGHT: tl.constexpr = CODE == "u8" or CODE == "s8" or CODE == "e4m3"
    GGUF: tl.constexpr = SCALE == "d" or SCALE == "dm" or SCALE == "k" or SCALE == "km"
    low, high = decoded(panels, start, K, UNIT, MASK, P, CODE, SCALE, GROUP, ZERO, T)
    if EIGHT:
        k = start + tl.arange(0, UNIT)
        if MASK:
            v = tl.load(x_rows[None, :] + k[:, None], mask=(k < K)[:, None], other=0.0)
        else:
            v = tl.load(x_rows[None, :] + k[:, None])
        if GROUP == 0:
            acc = tl.dot(low, v, acc, input_precision="ieee")
        else:
            d = scales_of(group_area(panels, start, K, CODE, SCALE, GROUP, ZERO), SCALE, P)
            acc += tl.dot(low, v, input_precision="ieee") * d[:, None]
    else:
        k = tl.arange(0, UNIT // 2)
        k = start + k // 32 * 64 + k % 32
        if MASK:
            v = tl.load(x_rows[None, :] + k[:, None], mask=(k < K)[:, None], other=0.0)
            u = tl.load(x_rows[None, :] + (k + 32)[:, None], mask=(k + 32 < K)[:, None], other=0.0)
        else:
            v = tl.load(x_rows[None, :] + k[:, None])
            u = tl.load(x_rows[None, :] + (k + 32)[:, None])
        if GROUP == 16 or GGUF:
            acc = tl.dot(low, v, acc, input_precision="ieee")
            acc = tl.dot(high, u, acc, input_precision="ieee")
        else:
            d = scales_of(group_area(panels, start, K, CODE, SCALE, GROUP, ZERO), SCALE, P)
            if GROUP == 32:
                acc += tl.dot(low, v, input_precision="ieee") * d[:, None]
                d = scales_of(group_area(panels, start + 32, K, CODE, SCALE, GROUP, ZERO), SCALE, P)
                acc += tl.dot(high, u, input_precision="ieee") * d[:, None]
            else:
                part = tl.dot(low, v, input_precision="ieee")
                part = tl.dot(high, u, part, input_precision="ieee")
                acc += part * d[:, None]
    return acc


@triton.jit
def scaled(
    acc,
    panels,
    K: tl.constexpr,
    P: tl.constexpr,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """``acc`` (16 P, tokens) times the rows' scales, where a type has them."""
    if GROUP == 0 or SCALE == "e4m3":
        COLS: tl.constexpr = 32 if CODE == "u8" or CODE == "s8" or CODE == "e4m3" else 64
        area = panels + (K + COLS - 1) // COLS * 512
        return acc * scales_of(area, "float32", P)[:, None]
    else:
        return acc


@triton.jit
def packed(
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
    PANEL_BYTES: tl.constexpr,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK_M: tl.constexpr,
    P: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """As ``triton_stream.stream``, which explains the division of the work; a tile of rows is ``P`` panels.

    With ``KIND`` the weight has N gate rows, whole panels, then N up rows.
    """
    pid = tl.program_id(0)
    BLOCK_N: tl.constexpr = P * 16
    BLOCK_K: tl.constexpr = UNIT * UNITS
    PANELS: tl.constexpr = (N + 15) // 16
    n_tiles: tl.constexpr = (PANELS + P - 1) // P
    k_tiles: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    steps: tl.constexpr = n_tiles * k_tiles
    whole: tl.constexpr = steps % PROGRAMS == 0 and steps // PROGRAMS % k_tiles == 0
    first = pid * steps // PROGRAMS
    last = (pid + 1) * steps // PROGRAMS
    p = tl.arange(0, P)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    if DEPENDENT:
        gdc_launch_dependents()
        if PREFETCH > 0:
            head = weight + tl.minimum(first // k_tiles * P + p, PANELS - 1).to(tl.int64) * PANEL_BYTES
            code_bits: tl.constexpr = 8 if CODE == "u8" or CODE == "s8" or CODE == "e4m3" else 4
            ahead: tl.constexpr = BLOCK_K * 2 * code_bits
            head += first % k_tiles * ahead
            prefetch(head, PREFETCH)
            if KIND != "":
                prefetch(head + PANELS * PANEL_BYTES, PREFETCH)
        gdc_wait()
    # Clamped, not masked: what a row beyond the end computes is dropped at the store.
    x_rows = x + tl.minimum(m, tokens - 1).to(tl.int64) * X_ROW
    # A program meets two shared tiles at most: where its run begins, and where it ends.
    size: tl.constexpr = BLOCK_N * BLOCK_M * (2 if KIND != "" else 1)
    parts = partial
    if not whole:
        inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        parts = partial + tl.program_id(1).to(tl.int64) * (2 * PROGRAMS * size) + inner
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        tile = step // k_tiles
        panels = weight + tl.minimum(tile * P + p, PANELS - 1).to(tl.int64) * PANEL_BYTES
        for i in tl.static_range(UNITS):
            at = step % k_tiles * BLOCK_K + i * UNIT
            ups = panels + PANELS * PANEL_BYTES
            acc = unit(acc, panels, x_rows, at, K, UNIT, K % BLOCK_K != 0, P, CODE, SCALE, GROUP, ZERO)
            if KIND != "":
                up = unit(up, ups, x_rows, at, K, UNIT, K % BLOCK_K != 0, P, CODE, SCALE, GROUP, ZERO)
        if (step % k_tiles == k_tiles - 1) | (step == last - 1):
            begin = tile * k_tiles
            if whole or (first <= begin) & (last >= begin + k_tiles):
                y = scaled(acc, panels, K, P, CODE, SCALE, GROUP)
                u = scaled(up, ups, K, P, CODE, SCALE, GROUP) if KIND != "" else up
                n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
                finish(y, u, bias, residual, out, n, m, tokens, N, R_ROW, KIND)
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
                low = ((begin + 1) * PROGRAMS - 1) // steps
                high = ((begin + k_tiles) * PROGRAMS - 1) // steps
                counter = counters + tl.program_id(1) * n_tiles + tile
                if tl.atomic_add(counter, 1, sem="acq_rel") == high - low:
                    tl.store(counter, 0)
                    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                    for program in range(low, high + 1):
                        part = (
                            parts + (2 * program + (begin > program * steps // PROGRAMS).to(tl.int32)) * size
                        )
                        acc += tl.load(part, cache_modifier=".cg")
                        if KIND != "":
                            up += tl.load(part + BLOCK_N * BLOCK_M, cache_modifier=".cg")
                    panels = weight + tl.minimum(tile * P + p, PANELS - 1).to(tl.int64) * PANEL_BYTES
                    ups = panels + PANELS * PANEL_BYTES
                    y = scaled(acc, panels, K, P, CODE, SCALE, GROUP)
                    u = scaled(up, ups, K, P, CODE, SCALE, GROUP) if KIND != "" else up
                    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
                    finish(y, u, bias, residual, out, n, m, tokens, N, R_ROW, KIND)
