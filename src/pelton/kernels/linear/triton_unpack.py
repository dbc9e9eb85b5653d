"""Packed weights as dense rows: whole (``mma16``, ``rows8``), for products of many tokens, or rows of a table
(``mma16``)."""

import triton
import triton.language as tl

from pelton.kernels.gpu.triton_dependent import gdc_launch_dependents, gdc_wait
from pelton.kernels.linear.triton_decode import decode8, nibble
from pelton.kernels.linear.triton_gguf import gguf_row
from pelton.kernels.linear.triton_packed import decoded, group_area, load_scales, scales_of


@triton.jit
def unpack(
    weight,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    PANEL_BYTES: tl.constexpr,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    P: tl.constexpr,
    UNIT: tl.constexpr,
):
    """``out``: (N, K). A program: ``P`` panels and ``UNIT`` columns, as ``triton_packed.unit`` takes them."""
    T: tl.constexpr = out.dtype.element_ty
    EIGHT: tl.constexpr = CODE == "u8" or CODE == "s8" or CODE == "e4m3"
    COLS: tl.constexpr = 32 if EIGHT else 64
    PANELS: tl.constexpr = (N + 15) // 16
    first = tl.program_id(1) * P
    start = tl.program_id(0) * UNIT
    panels = weight + tl.minimum(first + tl.arange(0, P), PANELS - 1).to(tl.int64) * PANEL_BYTES
    GGUF: tl.constexpr = SCALE == "d" or SCALE == "dm" or SCALE == "k" or SCALE == "km"
    low, high = decoded(panels, start, K, UNIT, K % UNIT != 0, P, CODE, SCALE, GROUP, ZERO, T)
    if GGUF:
        d = tl.full([P * 16], 1.0, tl.float32)  # they are scaled
    elif GROUP == 0 or GROUP == 16:
        d = scales_of(panels + (K + COLS - 1) // COLS * 512, "float32", P)
    else:
        d = scales_of(group_area(panels, start, K, CODE, SCALE, GROUP, ZERO), SCALE, P)
    n = first * 16 + tl.arange(0, P * 16)
    rows = out + n.to(tl.int64)[:, None] * K
    if EIGHT:
        k = start + tl.arange(0, UNIT)
        value = (low.to(tl.float32) * d[:, None]).to(T)
        tl.store(rows + k[None, :], value, mask=(n < N)[:, None] & (k < K)[None, :])
    else:
        k = tl.arange(0, UNIT // 2)
        k = start + k // 32 * 64 + k % 32
        value = (low.to(tl.float32) * d[:, None]).to(T)
        tl.store(rows + k[None, :], value, mask=(n < N)[:, None] & (k < K)[None, :])
        if GROUP == 32 and not GGUF:
            d = scales_of(group_area(panels, start + 32, K, CODE, SCALE, GROUP, ZERO), SCALE, P)
        k += 32
        value = (high.to(tl.float32) * d[:, None]).to(T)
        tl.store(rows + k[None, :], value, mask=(n < N)[:, None] & (k < K)[None, :])


@triton.jit
def unpack_rows(
    weight,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    ROW: tl.constexpr,
    SCALES: tl.constexpr,
    CODE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """``rows8``: codes every ``ROW`` bytes, scales from byte ``SCALES`` on -> ``out``: (N, K).

    ``GROUP``: columns of a scale, a multiple of ``COLUMNS``; 0: all.
    """
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (n < N)[:, None] & (k < K)[None, :]
    codes = tl.load(weight + n.to(tl.int64)[:, None] * ROW + k[None, :], mask=inside, other=0)
    scales = (weight + SCALES).to(tl.pointer_type(tl.float32))
    if GROUP:
        scales += tl.program_id(0) * COLUMNS // GROUP * N
    d = tl.load(scales + n, mask=n < N, other=0.0)
    value = decode8(codes, CODE, out.dtype.element_ty).to(tl.float32) * d[:, None]
    tl.store(out + n.to(tl.int64)[:, None] * K + k[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gather_packed(
    index,
    table,
    out,
    K: tl.constexpr,
    PANEL_BYTES: tl.constexpr,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Rows ``index`` of ``table``; a program takes ``BLOCK`` columns of one."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    EIGHT: tl.constexpr = CODE == "u8" or CODE == "s8" or CODE == "e4m3"
    COLS: tl.constexpr = 32 if EIGHT else 64
    BLOCKS: tl.constexpr = (K + COLS - 1) // COLS
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(index + token).to(tl.int64)
    panel = table + row // 16 * PANEL_BYTES
    r = (row % 16).to(tl.int32)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < K
    at = r % 8 * 64 + k % 8 // 2 * 16 + k % 32 // 16 * 8 + k % 16 // 8 * 4 + r // 8 * 2 + k % 2
    GGUF: tl.constexpr = SCALE == "d" or SCALE == "dm" or SCALE == "k" or SCALE == "km"
    if GGUF:
        value = gguf_row(panel, r, k, at, inside, K, CODE, SCALE, GROUP)
    else:
        byte = tl.load(panel + k // COLS * 512 + at, mask=inside, other=0)
        column = tl.minimum(k, K - 1)
        scales = panel + BLOCKS * 512
        if EIGHT:
            value = decode8(byte, CODE, tl.float32)
        else:
            value = nibble(tl.where(k % 64 < 32, byte & 15, byte >> 4), CODE, tl.float32)
        if GROUP == 0:
            value *= load_scales(scales, r, "float32")
        elif GROUP == 16:
            value *= load_scales(scales, r, "float32") * load_scales(
                scales + 64 + column // 16 * 16, r, SCALE
            )
        else:
            area = group_area(panel, column, K, CODE, SCALE, GROUP, ZERO)
            if ZERO:
                z = tl.load(area + (32 if SCALE == "float16" else 64) + r).to(tl.float32)
                value -= z - 128 if CODE == "u8" else z
            value *= load_scales(area, r, SCALE)
    tl.store(out + token * K + k, value.to(out.dtype.element_ty), mask=inside)
