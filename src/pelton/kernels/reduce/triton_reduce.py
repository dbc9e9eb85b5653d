"""reduce and softmax in Triton: one program a row and head, the row in registers."""

import triton
import triton.language as tl


@triton.jit
def reduce(
    x,
    out,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    X_ROW: tl.constexpr,
    X_HEAD: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    mask = d < D
    source = x + row * X_ROW + head * X_HEAD + d
    if KIND == "sum" or KIND == "mean":
        a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        total = tl.sum(a, axis=0)
        if KIND == "mean":
            total = total / D
        tl.store(out + row * HEADS + head, total.to(out.dtype.element_ty))
    else:
        a = tl.load(source, mask=mask, other=float("-inf")).to(tl.float32)
        nans = tl.sum(tl.where(a != a, 1.0, 0.0), axis=0)
        top = tl.where(nans > 0.0, float("nan"), tl.max(a, axis=0))
        if KIND == "max":
            tl.store(out + row * HEADS + head, top.to(out.dtype.element_ty))
        else:
            e = tl.exp(a - top)
            y = e / tl.sum(e, axis=0)
            tl.store(out + (row * HEADS + head) * D + d, y.to(out.dtype.element_ty), mask=mask)
