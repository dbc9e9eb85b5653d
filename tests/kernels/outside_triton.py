"""A Triton tactic from outside Pelton, as a user's package would have it."""

from __future__ import annotations

import triton
import triton.language as tl
from tests.kernels import outside  # noqa: F401  defines the op

from pelton.kernels.user_tactic import tactic


@triton.jit
def swish_norm_kernel(x_ptr, out_ptr, row_stride, n, beta, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * row_stride + offsets, mask=offsets < n, other=0.0)
    y = x * tl.sigmoid(beta * x)
    scale = 1.0 / tl.sqrt(tl.sum(y * y) / n + 1e-6)
    tl.store(out_ptr + row * n + offsets, y * scale, mask=offsets < n)


@tactic("outside::swish_norm", device="cuda", supports=lambda x, beta: len(x.shape) == 2)
def swish_norm_triton(x, beta, out):  # type: ignore[no-untyped-def]
    rows, n = x.shape
    block = triton.next_power_of_2(n)
    swish_norm_kernel[(rows,)](x, out, x.stride(0), n, beta, BLOCK=block, num_warps=4)
