"""fuse_gate_mlp: the gate and up projections of a gated MLP become one, as in fuse_qkv."""

from __future__ import annotations

from pelton import nn
from pelton.passes.base import Pass, PassContext, PassReport
from pelton.passes.stack_linears import fuse_parts

NAME = "fuse_gate_mlp"
PARTS = ("gate_proj", "up_proj")


def run(model: nn.CausalLM, context: PassContext) -> PassReport:
    """Rewrite every unpacked ``nn.GatedMLP`` of ``model`` in place."""
    return fuse_parts(model, context, name=NAME, kind=nn.GatedMLP, parts=PARTS, into="gate_up_proj")


PASS = Pass(
    name=NAME,
    kind="model",
    run=run,
    rewrite="gate_proj(x), up_proj(x) -> gate_up_proj(x).split()",
    bound="float32 rounding",
)
