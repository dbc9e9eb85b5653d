"""gated_activation in Triton."""

import triton
import triton.language as tl

from pelton.kernels.gpu.triton_dependent import gdc_launch_dependents, gdc_wait


@triton.jit
def activate(v, KIND: tl.constexpr):
    """The activation ``KIND`` of float32 values (``ir.ops.activation.KINDS``)."""
    if KIND == "silu":
        return v / (1.0 + tl.exp(-v))
    elif KIND == "gelu":
        return 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # tanh(u) = 1 - 2 / (exp(2 u) + 1)
        u = 0.7978845608028654 * (v + 0.044715 * v * v * v)
        return 0.5 * v * (2.0 - 2.0 / (tl.exp(2.0 * u) + 1.0))
    else:
        tl.static_assert(KIND == "relu")
        return tl.maximum(v, 0.0)


@triton.jit
def gated_activation(
    gate,
    up,
    out,
    WIDTH: tl.constexpr,
    GATE_ROW: tl.constexpr,
    UP_ROW: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < WIDTH
    g = tl.load(gate + row * GATE_ROW + cols, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * UP_ROW + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + cols, (activate(g, KIND) * u).to(out.dtype.element_ty), mask=mask)
