"""kv_write in Triton: one program a token and KV head."""

import triton
import triton.language as tl

from pelton.kernels.kv_write.triton_codes import encode, encode_keys


@triton.jit
def kv_write(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    k_scale,
    v_scale,
    k_shift,
    k_queries,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    d = tl.arange(0, BLOCK)
    mask = d < D
    at = ((slot // PAGE * HEADS + head) * PAGE + slot % PAGE) * D + d
    key = tl.load(k + row * K_ROW + head * K_HEAD + d, mask=mask)
    value = tl.load(v + row * V_ROW + head * V_HEAD + d, mask=mask)
    key_scale = None if k_scale is None else tl.load(k_scale + head)
    value_scale = None if v_scale is None else tl.load(v_scale + head)
    kind: tl.constexpr = k_cache.dtype.element_ty
    keys = k_cache + at
    tl.store(keys, encode_keys(key, key_scale, k_shift, k_queries, head, d, mask, D, kind), mask=mask)
    tl.store(v_cache + at, encode(value, value_scale, kind), mask=mask)
