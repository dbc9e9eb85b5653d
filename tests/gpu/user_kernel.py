"""A Triton tactic as users write them, for an op of Pelton's."""

from typing import Any

import triton
import triton.language as tl

import pelton


@triton.jit
def times_kernel(x_ptr, out_ptr, row_stride, n, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * row_stride + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * n + offsets, x * factor, mask=offsets < n)


@pelton.tactic("scale", device="cuda", supports=lambda x, factor: len(x.shape) == 2)
def times(x: Any, factor: float, out: Any) -> None:
    rows, n = x.shape
    times_kernel[(rows,)](x, out, x.stride(0), n, factor, BLOCK=triton.next_power_of_2(n))
