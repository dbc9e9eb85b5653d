"""fuse_gate_mlp: the gate and up projections of a gated MLP become one, as in fuse_qkv."""

from __future__ import annotations

from pelton import nn
from pelton.passes.base import PassContext, PassReport
from pelton.passes.stack_linears import stack_linears

NAME = "fuse_gate_mlp"
PARTS = ("gate_proj", "up_proj")


def run(model: nn.CausalLM, context: PassContext) -> PassReport:
    """Rewrite every unpacked ``nn.GatedMLP`` of ``model`` in place."""
    recipes = nn.collect_recipes(model)
    matched, changed, skipped = 0, 0, []
    for where, module in model.named_modules():
        if not isinstance(module, nn.GatedMLP):
            continue
        matched += 1
        if module.packed:
            skipped.append((where, "gate and up are packed in the checkpoint"))
            continue
        parts = {name: getattr(module, name) for name in PARTS}
        stacked = stack_linears(parts, where, recipes, context)
        if isinstance(stacked, str):
            skipped.append((where, stacked))
            continue
        for name in PARTS:
            delattr(module, name)
        module.gate_up_proj = stacked
        module.packed = True
        changed += 1
    return PassReport(name=NAME, matched=matched, changed=changed, skipped=tuple(skipped))
