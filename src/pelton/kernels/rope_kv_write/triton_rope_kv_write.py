"""rope_kv_write in Triton: one program a token and ``HEADS`` heads, queries first, then keys with values."""

import triton
import triton.language as tl

from pelton.kernels.kv_write.triton_codes import encode, encode_keys


@triton.jit
def rotated(x, mask_h, weight, cos_sin, eps, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Heads of D values at ``x`` (a column of addresses), normalised when there is a ``weight``, their
    first 2 * HALF rotated."""
    d = tl.arange(0, BLOCK)
    mask = mask_h[:, None] & (d < D)[None, :]
    rotates = d < 2 * HALF
    # The other of the two values that a dimension is rotated with.
    other = tl.where(d < HALF, d + HALF, tl.where(rotates, d - HALF, d))
    kind = x.dtype.element_ty
    a = tl.load(x[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x[:, None] + other[None, :], mask=mask, other=0.0).to(tl.float32)
    if weight is not None:
        # Rounded where the reference rounds: the norm's result has the element type.
        scale = tl.rsqrt(tl.sum(a * a, 1) / D + eps)[:, None]
        a = a * scale * tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        b = b * scale * tl.load(weight + other, mask=d < D, other=0.0).to(tl.float32)[None, :]
        a = a.to(kind).to(tl.float32)
        b = b.to(kind).to(tl.float32)
    i = tl.where(d < HALF, d, d - HALF)
    cos = tl.load(cos_sin + i, mask=rotates, other=1.0)[None, :]
    sin = tl.load(cos_sin + HALF + i, mask=rotates, other=0.0)[None, :]
    return a * cos + tl.where((d < HALF)[None, :], -b, b) * sin


@triton.jit
def _column(scale, head, HEADS: tl.constexpr):
    """The heads' scales, one a row."""
    return tl.load(scale + head, mask=head < HEADS, other=1.0)[:, None]


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
    k_scale,
    v_scale,
    k_shift,
    k_queries,
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
    HEADS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    table = cos_sin + row * (2 * HALF)
    q_parts: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    # Not in the branch that needs them: what is None may not be set in one.
    scaled = tl.maximum(part - q_parts, 0) * HEADS + tl.arange(0, HEADS)
    key_scale = None if k_scale is None else _column(k_scale, scaled, KV_HEADS)
    value_scale = None if v_scale is None else _column(v_scale, scaled, KV_HEADS)
    if part < q_parts:
        head = part * HEADS + tl.arange(0, HEADS)
        mask_h = head < Q_HEADS
        turned = rotated(q + row * Q_ROW + head * Q_HEAD, mask_h, q_weight, table, eps, D, HALF, BLOCK)
        at = (row * Q_HEADS + head)[:, None] * D + d[None, :]
        tl.store(out + at, turned.to(out.dtype.element_ty), mask=mask_h[:, None] & (d < D)[None, :])
    else:
        head = (part - q_parts) * HEADS + tl.arange(0, HEADS)
        mask_h = head < KV_HEADS
        slot = tl.load(slots + row).to(tl.int64)
        if slot >= 0:
            mask = mask_h[:, None] & (d < D)[None, :]
            at = ((slot // PAGE * KV_HEADS + head) * PAGE + slot % PAGE)[:, None] * D + d[None, :]
            turned = rotated(k + row * K_ROW + head * K_HEAD, mask_h, k_weight, table, eps, D, HALF, BLOCK)
            # As the unfused ops do: k has the element type before it gets the cache's.
            key = turned.to(k.dtype.element_ty)
            kind: tl.constexpr = k_cache.dtype.element_ty
            key = encode_keys(key, key_scale, k_shift, k_queries, head[:, None], d[None, :], mask, D, kind)
            tl.store(k_cache + at, key, mask=mask)
            value = tl.load(v + row * V_ROW + (head * V_HEAD)[:, None] + d[None, :], mask=mask, other=0.0)
            tl.store(v_cache + at, encode(value, value_scale, v_cache.dtype.element_ty), mask=mask)
