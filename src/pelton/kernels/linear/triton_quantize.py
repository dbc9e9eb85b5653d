"""Rows as 8-bit codes with float32 scales, for products of 8-bit codes (``hopper_packed.cu``)."""

import triton
import triton.language as tl


@triton.jit
def _nearest_e4m3(x):
    """Of numbers of at most 448 the nearest e4m3, ties to even, so that converting is exact anywhere."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) & -0x100000).to(tl.float32, bitcast=True)
    # Below 2^-6 the step is 2^-9.
    return tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, normal)


@triton.jit
def quantize_rows(
    x,
    norm,
    codes,
    scales,
    eps,
    K: tl.constexpr,
    X_ROW: tl.constexpr,
    X_CODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row by row: the RMS norm where ``norm`` is given; ``codes`` (T, K), ``scales`` (T,).

    A value is ``d q`` with d = max|x| / 127 ("int8") or / 448 ("fp8") of the row. Of each 16 columns the
    codes stand in the order of tensor-core fragments, as ``mma16``'s products need them: column 8 c + 2 q + e
    at 4 q + 2 c + e.
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    v = tl.load(x + row * X_ROW + k, mask=k < K, other=0.0).to(tl.float32)
    if norm is not None:
        scale = tl.rsqrt(tl.sum(v * v, 0) / K + eps)
        g = tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
        # Rounded as the norm's own result would be.
        v = (v * scale * g).to(x.dtype.element_ty).to(tl.float32)
    largest: tl.constexpr = 127.0 if X_CODES == "int8" else 448.0
    top = tl.max(tl.abs(v), 0)
    tl.store(scales + row, top / largest)
    ratio = v * tl.where(top > 0, largest / top, 0.0)
    if X_CODES == "int8":
        # Ties to even, as the largest numbers with a unit's step are.
        q = ((ratio + 12582912.0) - 12582912.0).to(tl.int8).to(tl.uint8, bitcast=True)
    else:
        q = _nearest_e4m3(ratio).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    at = codes + row * K + k // 16 * 16 + k % 8 // 2 * 4 + k % 16 // 8 * 2 + k % 2
    tl.store(at, q, mask=k < K)
