"""add_rms_norm in Triton: one program a row; the sum is rounded before it is normalised, as it is stored."""

import triton
import triton.language as tl

from pelton.kernels.gpu.triton_dependent import gdc_launch_dependents, gdc_wait


@triton.jit
def add_rms_norm(
    x,
    residual,
    weight,
    out,
    total,
    eps,
    D: tl.constexpr,
    X_ROW: tl.constexpr,
    R_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < D
    a = tl.load(x + row * X_ROW + cols, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(residual + row * R_ROW + cols, mask=mask, other=0.0).to(tl.float32)
    rounded = (a + b).to(total.dtype.element_ty)
    tl.store(total + row * D + cols, rounded, mask=mask)
    v = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, 0) / D + eps)
    w = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * D + cols, (v * scale * w).to(out.dtype.element_ty), mask=mask)
