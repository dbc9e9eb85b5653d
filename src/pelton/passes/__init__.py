"""Rewrites of a model on its way to a plan: one file per pass, run in the order of ``PASSES``."""

from pelton.passes import (
    add_rms_norm,
    dead_code,
    early_take_rows,
    fuse_gate_mlp,
    fuse_qkv,
    gemm_swiglu,
    rope_kv_write,
)
from pelton.passes.base import Mode, Pass, PassContext, PassReport
from pelton.passes.run import run_graph_passes, run_model_passes

PASSES: tuple[Pass, ...] = (
    fuse_qkv.PASS,
    fuse_gate_mlp.PASS,
    # From here on over the traced graph.
    early_take_rows.PASS,
    add_rms_norm.PASS,
    rope_kv_write.PASS,
    gemm_swiglu.PASS,
    dead_code.PASS,
)
"""Every pass in order: model passes, then graph passes."""

__all__ = ["PASSES", "Mode", "Pass", "PassContext", "PassReport", "run_graph_passes", "run_model_passes"]
