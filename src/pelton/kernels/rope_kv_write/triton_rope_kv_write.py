"""rope_kv_write in Triton: one program a token and head, queries first, then keys with their values."""

import triton
import triton.language as tl


@triton.jit
def _rotated(x, weight, cos_sin, eps, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """A head of D values at ``x``, normalised when there is a ``weight``, its first 2 * HALF rotated."""
    d = tl.arange(0, BLOCK)
    mask = d < D
    rotates = d < 2 * HALF
    # The other of the two values that a dimension is rotated with.
    other = tl.where(d < HALF, d + HALF, tl.where(rotates, d - HALF, d))
    a = tl.load(x + d, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + other, mask=mask, other=0.0).to(tl.float32)
    if weight is not None:
        # Rounded where the reference rounds: the norm's result has the element type.
        scale = tl.rsqrt(tl.sum(a * a, 0) / D + eps)
        a = a * scale * tl.load(weight + d, mask=mask, other=0.0).to(tl.float32)
        b = b * scale * tl.load(weight + other, mask=mask, other=0.0).to(tl.float32)
        a = a.to(x.dtype.element_ty).to(tl.float32)
        b = b.to(x.dtype.element_ty).to(tl.float32)
    i = tl.where(d < HALF, d, d - HALF)
    cos = tl.load(cos_sin + i, mask=rotates, other=1.0)
    sin = tl.load(cos_sin + HALF + i, mask=rotates, other=0.0)
    return a * cos + tl.where(d < HALF, -b, b) * sin


@triton.jit
def rope_kv_write(
    q,
    k,
    v,
    cos_sin,
    k_cache,
    v_cache,
    slots,
    q_weight,
    k_weight,
    out,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    Q_HEAD: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    mask = d < D
    table = cos_sin + row * (2 * HALF)
    if head < Q_HEADS:
        rotated = _rotated(q + row * Q_ROW + head * Q_HEAD, q_weight, table, eps, D, HALF, BLOCK)
        tl.store(out + (row * Q_HEADS + head) * D + d, rotated.to(out.dtype.element_ty), mask=mask)
    else:
        head -= Q_HEADS
        slot = tl.load(slots + row).to(tl.int64)
        if slot >= 0:
            at = ((slot // PAGE * KV_HEADS + head) * PAGE + slot % PAGE) * D + d
            rotated = _rotated(k + row * K_ROW + head * K_HEAD, k_weight, table, eps, D, HALF, BLOCK)
            # As the unfused ops do: k has the element type before it gets the cache's.
            tl.store(k_cache + at, rotated.to(k.dtype.element_ty).to(k_cache.dtype.element_ty), mask=mask)
            value = tl.load(v + row * V_ROW + head * V_HEAD + d, mask=mask, other=0.0)
            tl.store(v_cache + at, value.to(v_cache.dtype.element_ty), mask=mask)
