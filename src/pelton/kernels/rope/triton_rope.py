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
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    mask = d < D
    rotates = d < 2 * HALF
    # The other of the two values that a dimension is rotated with.
    other = tl.where(d < HALF, d + HALF, tl.where(rotates, d - HALF, d))
    source = x + row * X_ROW + head * X_HEAD
    a = tl.load(source + d, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + other, mask=mask, other=0.0).to(tl.float32)
    i = tl.where(d < HALF, d, d - HALF)
    cos = tl.load(cos_sin + row * (2 * HALF) + i, mask=rotates, other=1.0)
    sin = tl.load(cos_sin + row * (2 * HALF) + HALF + i, mask=rotates, other=0.0)
    y = a * cos + tl.where(d < HALF, -b, b) * sin
    tl.store(out + (row * HEADS + head) * D + d, y.to(out.dtype.element_ty), mask=mask)
