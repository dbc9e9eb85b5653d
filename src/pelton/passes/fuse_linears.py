"""fuse_linears: linear layers over one input, in models that are a graph of calls, become one.

What fuse_qkv and fuse_gate_mlp do for Pelton's own modules, for imported models: whatever their modules
are called, layers of one module that read the same tensor are stacked.
"""

from __future__ import annotations

from pelton import nn
from pelton.passes.base import Pass, PassContext, PassReport

NAME = "fuse_linears"


def run(model: nn.CausalLM, context: PassContext) -> PassReport:
    """Stack each of the model's ``linear_groups`` whose weights have one value type."""
    recipes = nn.collect_recipes(model)
    matched, changed, skipped = 0, 0, []
    for weights in model.linear_groups():
        matched += 1
        types = {name: context.quant_of(recipes[name]) for name in weights}
        if len(set(types.values())) > 1:
            kinds = ", ".join(f"{name} {kind}" for name, kind in types.items())
            skipped.append((weights[0], f"value types differ: {kinds}"))
            continue
        model.stack_linears(weights)
        changed += 1
    return PassReport(name=NAME, matched=matched, changed=changed, skipped=tuple(skipped))


PASS = Pass(
    name=NAME,
    kind="model",
    run=run,
    rewrite="linear(x, A), linear(x, B) -> split(linear(x, [A, B]))",
    bound="float32 rounding",
)
