"""rms_norm in Triton: one program a row and head."""

import triton
import triton.language as tl

from pelton.kernels.gpu.triton_dependent import gdc_launch_dependents, gdc_wait


@triton.jit
def rms_norm(
    x,
    weight,
    out,
    eps,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    X_ROW: tl.constexpr,
    X_HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    CONSTANT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """``CONSTANT``: the weight is no kernel's result, and may be read ahead."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    mask = cols < D
    if CONSTANT:
        w = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    v = tl.load(x + row * X_ROW + head * X_HEAD + cols, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, 0) / D + eps)
    if not CONSTANT:
        w = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + (row * HEADS + head) * D + cols, (v * scale * w).to(out.dtype.element_ty), mask=mask)
