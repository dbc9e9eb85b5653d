"""fuse_qkv: the q, k and v projections of an attention become one, its outputs views of one tensor.

One product with a taller weight uses the hardware better than three, and the input is quantised
once. Left alone: attention whose checkpoint is packed already, and projections of different value
types (GGUF's mixed K-quants give v more bits).
"""

from __future__ import annotations

from pelton import nn
from pelton.passes.base import PassContext, PassReport
from pelton.passes.stack_linears import stack_linears

NAME = "fuse_qkv"
PARTS = ("q_proj", "k_proj", "v_proj")


def run(model: nn.CausalLM, context: PassContext) -> PassReport:
    """Rewrite every unpacked ``nn.Attention`` of ``model`` in place."""
    recipes = nn.collect_recipes(model)
    matched, changed, skipped = 0, 0, []
    for where, module in model.named_modules():
        if not isinstance(module, nn.Attention):
            continue
        matched += 1
        if module.packed:
            skipped.append((where, "q, k and v are packed in the checkpoint"))
            continue
        parts = {name: getattr(module, name) for name in PARTS}
        stacked = stack_linears(parts, where, recipes, context)
        if isinstance(stacked, str):
            skipped.append((where, stacked))
            continue
        for name in PARTS:
            delattr(module, name)
        module.qkv_proj = stacked
        module.packed = True
        changed += 1
    return PassReport(name=NAME, matched=matched, changed=changed, skipped=tuple(skipped))
