"""Gathers of rows in Triton: embedding and take_rows are the same movement."""

import triton
import triton.language as tl

from pelton.kernels.gpu.triton_dependent import gdc_launch_dependents, gdc_wait


@triton.jit
def gather(
    index,
    table,
    out,
    D: tl.constexpr,
    TABLE_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < D
    source = tl.load(index + row).to(tl.int64)
    values = tl.load(table + source * TABLE_ROW + cols, mask=mask)
    tl.store(out + row * D + cols, values.to(out.dtype.element_ty), mask=mask)
