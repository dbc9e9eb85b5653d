"""GGUF's values in the layout ``mma16`` (``gpu_gguf.py``) as numbers, in registers, scaled.

``CODE`` is "u4", "u5" or "u6". ``SCALE`` says what a group has: "d" a float16 scale, "dm" an offset too; of
the K types an integer scale ("k") and an integer minimum too ("km"), times float16 numbers of 128 columns.
Codes of "d" and "k" mean what they are less a middle. Arithmetic is float32, rounded once at the end.
"""

import triton
import triton.language as tl


@triton.jit
def _half(at):
    return tl.load(at.to(tl.pointer_type(tl.float16), bitcast=True)).to(tl.float32)


@triton.jit
def scale_and_offset(areas, group, r, CODE: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr):
    """Of row ``r`` of panels whose scale areas begin at ``areas``, of the ``group``-th group of columns."""
    # As gpu_types.py has it, of types without offsets.
    MIDDLE: tl.constexpr = 32.0 if CODE == "u6" else 16.0 if CODE == "u5" else 4.0
    if SCALE == "d":
        d = _half(areas + group * 32 + r * 2)
        m = -MIDDLE * d
    elif SCALE == "dm":
        at = areas + group * 64 + r * 4
        d = _half(at)
        m = _half(at + 2)
    else:
        GROUPS: tl.constexpr = 128 // GROUP
        PAIR: tl.constexpr = 2 if SCALE == "km" else 1
        area = areas + group // GROUPS * (16 * PAIR * (2 + GROUPS))
        own = group % GROUPS
        at = area + 32 * PAIR + own // 4 * 64 + r * 4 + own % 4
        d = _half(area + r * 2 * PAIR)
        if SCALE == "km":
            m = -_half(area + r * 4 + 2) * tl.load(at + GROUPS // 4 * 64).to(tl.float32)
            d *= tl.load(at).to(tl.float32)
        else:
            d *= tl.load(at).to(tl.int8, bitcast=True).to(tl.float32)
            m = -MIDDLE * d
    return d, m


@triton.jit
def _half_of_blocks(
    q, areas, first, n: tl.constexpr, LAST: tl.constexpr, P: tl.constexpr, KB: tl.constexpr,
    CODE: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Codes ``q`` (KB, P, 32, 16) of blocks' ``n``-th halves, from ``first`` on; ``LAST``: the last block."""
    kb = tl.minimum(first + tl.arange(0, KB), LAST)
    g, s, h = tl.arange(0, 8), tl.arange(0, 2), tl.arange(0, 2)
    group = kb[:, None, None, None, None] * (64 // GROUP) + n * (32 // GROUP)
    if GROUP == 16:
        group += s[None, None, None, :, None]
    else:
        group += s[None, None, None, :, None] * 0
    row = g[None, None, :, None, None] + h[None, None, None, None, :] * 8
    d, m = scale_and_offset(areas[None, :, None, None, None], group, row, CODE, SCALE, GROUP)
    wide = q.to(tl.float32).reshape(KB, P, 8, 4, 2, 2, 2, 2)
    value = wide * d.reshape(KB, P, 8, 1, 2, 1, 2, 1) + m.reshape(KB, P, 8, 1, 2, 1, 2, 1)
    return value.to(T).reshape(KB, P, 32, 16)


@triton.jit
def gguf_halves(
    panels,
    first,
    BLOCKS: tl.constexpr,
    MASK: tl.constexpr,
    P: tl.constexpr,
    KB: tl.constexpr,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    T: tl.constexpr,
):
    """Values of ``KB`` of ``BLOCKS`` blocks, from ``first`` on, of ``panels`` (P addresses): of the first and
    of the second halves (KB, P, 32, 16), as bytes of codes lie. What is beyond the end is finite."""
    BYTES: tl.constexpr = 640 if CODE == "u5" else 768 if CODE == "u6" else 512
    kb = tl.arange(0, KB)[:, None, None, None]
    lane = tl.arange(0, 32)[None, None, :, None]
    byte = tl.arange(0, 16)[None, None, None, :]
    at = panels[None, :, None, None] + (first + kb) * BYTES
    inside = first + kb < BLOCKS
    codes = (
        tl.load(at + (lane * 16 + byte), mask=inside, other=0) if MASK else tl.load(at + (lane * 16 + byte))
    )
    low, high = codes & 15, codes >> 4
    if CODE == "u5":
        upper = at + (512 + lane * 4 + byte % 4)
        bits = tl.load(upper, mask=inside, other=0) if MASK else tl.load(upper)
        low |= (bits >> (byte // 4).to(tl.uint8) & 1) << 4
        high |= (bits >> (byte // 4 + 4).to(tl.uint8) & 1) << 4
    elif CODE == "u6":
        upper = at + (512 + lane * 8 + byte % 4)
        shift = (byte // 4 * 2).to(tl.uint8)
        bits = tl.load(upper, mask=inside, other=0) if MASK else tl.load(upper)
        low |= (bits >> shift & 3) << 4
        bits = tl.load(upper + 4, mask=inside, other=0) if MASK else tl.load(upper + 4)
        high |= (bits >> shift & 3) << 4
    areas = panels + BLOCKS * BYTES
    return (
        _half_of_blocks(low, areas, first, 0, BLOCKS - 1, P, KB, CODE, SCALE, GROUP, T),
        _half_of_blocks(high, areas, first, 1, BLOCKS - 1, P, KB, CODE, SCALE, GROUP, T),
    )


@triton.jit
def gguf_row(
    panel, r, k, at, inside, K: tl.constexpr, CODE: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr
):
    """Values of row ``r`` of ``panel`` at columns ``k``, float32; ``at``: bytes of their codes in a block."""
    BLOCKS: tl.constexpr = (K + 63) // 64
    BYTES: tl.constexpr = 640 if CODE == "u5" else 768 if CODE == "u6" else 512
    block, second = panel + k // 64 * BYTES, k % 64 >= 32
    byte = tl.load(block + at, mask=inside, other=0).to(tl.int32)
    q = tl.where(second, byte >> 4, byte & 15)
    if CODE == "u5":
        bits = tl.load(block + 512 + at // 16 * 4 + at % 4, mask=inside, other=0).to(tl.int32)
        q |= (bits >> (at % 16 // 4 + tl.where(second, 4, 0)) & 1) << 4
    elif CODE == "u6":
        upper = block + 512 + at // 16 * 8 + tl.where(second, 4, 0) + at % 4
        q |= (tl.load(upper, mask=inside, other=0).to(tl.int32) >> (at % 16 // 4 * 2) & 3) << 4
    group = tl.minimum(k, K - 1) // GROUP
    d, m = scale_and_offset(panel + BLOCKS * BYTES, group, r, CODE, SCALE, GROUP)
    return q.to(tl.float32) * d + m
