"""Elementwise ops in Triton, over rows of any stride: one or two inputs, and a number."""

import triton
import triton.language as tl

from pelton.kernels.gated_activation.triton_gated_activation import activate


@triton.jit
def pointwise(
    x,
    y,
    out,
    number,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    X_ROW: tl.constexpr,
    X_HEAD: tl.constexpr,
    Y_ROW: tl.constexpr,
    Y_HEAD: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = d < D
    a = tl.load(x + row * X_ROW + head * X_HEAD + d, mask=mask, other=0.0).to(tl.float32)
    if KIND == "add":
        a += tl.load(y + row * Y_ROW + head * Y_HEAD + d, mask=mask, other=0.0).to(tl.float32)
    elif KIND == "mul":
        a *= tl.load(y + row * Y_ROW + head * Y_HEAD + d, mask=mask, other=0.0).to(tl.float32)
    elif KIND == "scale":
        a *= number
    elif KIND == "softcap":
        # tanh(u) = 1 - 2 / (exp(2 u) + 1)
        a = number * (1.0 - 2.0 / (tl.exp(2.0 * a / number) + 1.0))
    elif KIND != "copy":
        a = activate(a, KIND)
    tl.store(out + (row * HEADS + head) * D + d, a.to(out.dtype.element_ty), mask=mask)
