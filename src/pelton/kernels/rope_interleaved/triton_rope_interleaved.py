"""rope_interleaved in Triton: one program a token and head."""

import triton
import triton.language as tl


@triton.jit
def rope_interleaved(
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
    even = d % 2 == 0
    source = x + row * X_ROW + head * X_HEAD
    a = tl.load(source + d, mask=mask, other=0.0).to(tl.float32)
    # The other of the pair that a dimension is rotated with.
    b = tl.load(source + tl.where(even, d + 1, d - 1), mask=rotates, other=0.0).to(tl.float32)
    cos = tl.load(cos_sin + row * (2 * HALF) + d // 2, mask=rotates, other=1.0)
    sin = tl.load(cos_sin + row * (2 * HALF) + HALF + d // 2, mask=rotates, other=0.0)
    y = a * cos + tl.where(even, -b, b) * sin
    tl.store(out + (row * HEADS + head) * D + d, y.to(out.dtype.element_ty), mask=mask)
