"""Rewrites of a model on its way to a plan: one file per pass, run in the order of ``PASSES``."""

from pelton.passes import (
    add_rms_norm,
    attention_bias,
    constant_folding,
    cse,
    dead_code,
    early_take_rows,
    explicit_quantise,
    fold_norm_weight,
    fold_scaling,
    fuse_gate_mlp,
    fuse_products,
    fuse_qkv,
    gemm_bias,
    gemm_residual,
    gemm_swiglu,
    move_quantise,
    norm_gemm,
    norm_quantise,
    parallelize_embedding,
    permute_inputs,
    quantise_kv,
    rope_kv_write,
    rope_paged_attention,
    share_embedding,
    simplify_views,
    smooth_keys,
    static_inputs,
    unfuse_qkv_gemm,
)
from pelton.passes.base import Mode, Pass, PassContext, PassReport
from pelton.passes.run import run_graph_passes, run_model_passes

PASSES: tuple[Pass, ...] = (
    share_embedding.PASS,
    parallelize_embedding.PASS,
    unfuse_qkv_gemm.PASS,
    smooth_keys.PASS,
    fuse_qkv.PASS,
    fuse_gate_mlp.PASS,
    # From here on over the traced graph.
    constant_folding.PASS,
    simplify_views.PASS,
    permute_inputs.PASS,
    fold_scaling.PASS,
    fold_norm_weight.PASS,
    cse.PASS,
    gemm_bias.PASS,
    attention_bias.PASS,
    early_take_rows.PASS,
    fuse_products.PASS,
    add_rms_norm.PASS,
    quantise_kv.PASS,
    rope_kv_write.PASS,
    rope_paged_attention.PASS,
    gemm_swiglu.PASS,
    explicit_quantise.PASS,
    move_quantise.PASS,
    norm_quantise.PASS,
    gemm_residual.PASS,
    norm_gemm.PASS,
    static_inputs.PASS,
    dead_code.PASS,
)
"""Every pass in order: model passes, then graph passes."""

__all__ = ["PASSES", "Mode", "Pass", "PassContext", "PassReport", "run_graph_passes", "run_model_passes"]
