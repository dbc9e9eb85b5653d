"""Pelton's ops, one per file. Importing this package registers all of them."""

from pelton.ir.ops import (  # noqa: F401
    activation,
    add,
    add_rms_norm,
    embedding,
    gated_activation,
    kv_write,
    layer_norm,
    linear,
    mul,
    paged_attention,
    rms_norm,
    rope,
    rope_cos_sin,
    rope_kv_write,
    scale,
    softcap,
    take_rows,
)
