"""fuse_qkv: the q, k and v projections of an attention become one, its outputs views of one tensor.

GGUF's mixed K-quants give some v projections more bits: those layers stay as they are.
"""

from __future__ import annotations

from pelton import nn
from pelton.passes.base import Pass, PassContext, PassReport
from pelton.passes.stack_linears import fuse_parts

NAME = "fuse_qkv"
PARTS = ("q_proj", "k_proj", "v_proj")


def run(model: nn.CausalLM, context: PassContext) -> PassReport:
    """Rewrite every unpacked ``nn.Attention`` of ``model`` in place."""
    return fuse_parts(model, context, name=NAME, kind=nn.Attention, parts=PARTS, into="qkv_proj")


PASS = Pass(
    name=NAME,
    kind="model",
    run=run,
    rewrite="q_proj(x), k_proj(x), v_proj(x) -> qkv_proj(x).split()",
    bound="float32 rounding",
)
