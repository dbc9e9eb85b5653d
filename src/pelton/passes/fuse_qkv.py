"""fuse_qkv: the q, k and v projections of an attention become one, its outputs views of one tensor.

GGUF's mixed K-quants give some v projections more bits: those layers stay as they are.
"""

from __future__ import annotations

from pelton import nn
from pelton.passes.base import PassContext, PassReport
from pelton.passes.stack_linears import fuse_parts

NAME = "fuse_qkv"
PARTS = ("q_proj", "k_proj", "v_proj")


def run(model: nn.CausalLM, context: PassContext) -> PassReport:
    """Rewrite every unpacked ``nn.Attention`` of ``model`` in place."""
    return fuse_parts(model, context, name=NAME, kind=nn.Attention, parts=PARTS, into="qkv_proj")
