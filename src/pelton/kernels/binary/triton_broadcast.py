"""unary, binary, binary_scalar and copy in Triton: (rows, heads, D) outputs, inputs of any strides.

An axis along which an input is broadcast has stride 0.
"""

import triton
import triton.language as tl


@triton.jit
def broadcast(
    x,
    y,
    out,
    number,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    X_ROW: tl.constexpr,
    X_HEAD: tl.constexpr,
    X_COLUMN: tl.constexpr,
    Y_ROW: tl.constexpr,
    Y_HEAD: tl.constexpr,
    Y_COLUMN: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = d < D
    a = tl.load(x + row * X_ROW + head * X_HEAD + d * X_COLUMN, mask=mask, other=1.0).to(tl.float32)
    if y is not None:
        b = tl.load(y + row * Y_ROW + head * Y_HEAD + d * Y_COLUMN, mask=mask, other=1.0).to(tl.float32)
    else:
        b = number
    if KIND == "abs":
        a = tl.abs(a)
    elif KIND == "cos":
        a = tl.cos(a)
    elif KIND == "exp":
        a = tl.exp(a)
    elif KIND == "log":
        a = tl.log(a)
    elif KIND == "neg":
        a = -a
    elif KIND == "reciprocal":
        a = 1.0 / a
    elif KIND == "rsqrt":
        a = 1.0 / tl.sqrt(a)
    elif KIND == "sigmoid":
        a = tl.sigmoid(a)
    elif KIND == "sin":
        a = tl.sin(a)
    elif KIND == "sqrt":
        a = tl.sqrt(a)
    elif KIND == "square":
        a = a * a
    elif KIND == "tanh":
        # tanh(u) = 1 - 2 / (exp(2 u) + 1), and a polynomial where that cancels.
        z = a * a
        small = a + a * z * (-0.333332837 + z * (0.133314908 + z * (-0.0537434965 + z * 0.0206505787)))
        a = tl.where(tl.abs(a) < 0.3, small, 1.0 - 2.0 / (tl.exp(2.0 * a) + 1.0))
    elif KIND == "add":
        a = a + b
    elif KIND == "sub":
        a = a - b
    elif KIND == "rsub":
        a = b - a
    elif KIND == "mul":
        a = a * b
    elif KIND == "div":
        a = a / b
    elif KIND == "rdiv":
        a = b / a
    elif KIND == "max":
        a = tl.where(a != a, a, tl.where(b > a, b, tl.where(b != b, b, a)))
    elif KIND == "min":
        a = tl.where(a != a, a, tl.where(b < a, b, tl.where(b != b, b, a)))
    elif KIND == "pow":
        magnitude = tl.exp(b * tl.log(tl.abs(a)))
        odd = b - 2.0 * tl.floor(b * 0.5) == 1.0
        signed = tl.where(odd, -magnitude, tl.where(tl.floor(b) == b, magnitude, float("nan")))
        a = tl.where(a < 0.0, signed, magnitude)
    tl.store(out + (row * HEADS + head) * D + d, a.to(out.dtype.element_ty), mask=mask)
