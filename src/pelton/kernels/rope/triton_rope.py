"""rope in Triton: one program a token and head."""

import triton
import triton.language as tl


@triton.jit
def rope(
    x,
    cos_sin,
    out,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    X_ROW: tl.constexpr,
    X_HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    mask = d < D
    rotates = d < 2 * HALF
    # Of the two values that are rotated with each other: whether this is the first, which is the other, and
    # which angle is theirs. Dimensions beyond both pass through.
    if INTERLEAVED:
        first = d % 2 == 0
        other = tl.where(first, d + 1, d - 1)
        i = d // 2
    else:
        first = d < HALF
        other = tl.where(first, d + HALF, d - HALF)
        i = tl.where(first, d, d - HALF)
    source = x + row * X_ROW + head * X_HEAD
    a = tl.load(source + d, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + other, mask=rotates, other=0.0).to(tl.float32)
    cos = tl.load(cos_sin + row * (2 * HALF) + i, mask=rotates, other=1.0)
    sin = tl.load(cos_sin + row * (2 * HALF) + HALF + i, mask=rotates, other=0.0)
    y = a * cos + tl.where(first, -b, b) * sin
    tl.store(out + (row * HEADS + head) * D + d, y.to(out.dtype.element_ty), mask=mask)
