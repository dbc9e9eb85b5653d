"""Rewrites of a model on its way to a plan: one file per pass, run in the order of the lists here."""

from pelton.passes import add_rms_norm, dead_code, early_take_rows, fuse_gate_mlp, fuse_qkv, rope_kv_write
from pelton.passes.base import (
    GraphPass,
    ModelPass,
    PassContext,
    PassReport,
    run_graph_passes,
    run_model_passes,
)

MODEL_PASSES: tuple[ModelPass, ...] = (fuse_qkv.run, fuse_gate_mlp.run)
GRAPH_PASSES: tuple[GraphPass, ...] = (
    early_take_rows.run,
    add_rms_norm.run,
    rope_kv_write.run,
    dead_code.run,
)

__all__ = [
    "GRAPH_PASSES",
    "MODEL_PASSES",
    "GraphPass",
    "ModelPass",
    "PassContext",
    "PassReport",
    "run_graph_passes",
    "run_model_passes",
]
