"""rope_cos_sin in Triton: one program a token."""

import triton
import triton.language as tl

from pelton.kernels.gpu.triton_dependent import gdc_launch_dependents, gdc_wait


@triton.jit
def rope_cos_sin(
    positions, inv_freq, out, scale, HALF: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    mask = i < HALF
    angle = tl.load(positions + row).to(tl.float32) * tl.load(inv_freq + i, mask=mask, other=0.0)
    tl.store(out + row * (2 * HALF) + i, tl.cos(angle) * scale, mask=mask)
    tl.store(out + row * (2 * HALF) + HALF + i, tl.sin(angle) * scale, mask=mask)
