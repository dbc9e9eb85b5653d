"""layer_norm in Triton: one program a row and head."""

import triton
import triton.language as tl


@triton.jit
def layer_norm(
    x,
    weight,
    bias,
    out,
    eps,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    X_ROW: tl.constexpr,
    X_HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    mask = cols < D
    v = tl.load(x + row * X_ROW + head * X_HEAD + cols, mask=mask, other=0.0).to(tl.float32)
    centred = tl.where(mask, v - tl.sum(v, 0) / D, 0.0)
    y = centred * tl.rsqrt(tl.sum(centred * centred, 0) / D + eps)
    if weight is not None:
        y *= tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        y += tl.load(bias + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + (row * HEADS + head) * D + cols, y.to(out.dtype.element_ty), mask=mask)
