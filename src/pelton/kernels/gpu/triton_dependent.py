"""Programmatic dependent launch in Triton kernels (compute capability 9.0 and later).

A kernel launched so may begin while the one before it still runs. It may then read weights only, and must
``gdc_wait()`` in every program before it reads or writes anything that a step writes: that returns when the
kernel before has ended and its writes are visible. That one waited likewise, so all earlier ones have ended.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["gdc_launch_dependents", "gdc_wait", "prefetch"]


@triton.jit
def prefetch(pointers, BYTES: tl.constexpr):
    """Have ``BYTES`` (a multiple of 16, at a multiple of 16) at each of ``pointers`` read into L2."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [pointers, BYTES],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
