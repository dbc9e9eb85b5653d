"""unfuse_qkv_gemm: a packed q, k and v projection becomes three again, the opposite of ``fuse_qkv``.

Wanted where the parts are stored in different types, so that each keeps its own, and wherever the user
forces it: to look at q, k and v apart, or to give them different treatment.
"""

from __future__ import annotations

from typing import Any

import torch

from pelton import nn
from pelton.ir.recipe import Concat, Recipe, Rows
from pelton.passes.base import Pass, PassContext, PassReport

NAME = "unfuse_qkv_gemm"
PARTS = ("q_proj", "k_proj", "v_proj")


def run(model: nn.CausalLM, context: PassContext) -> PassReport:
    """Split ``qkv_proj`` of every packed ``nn.Attention`` whose parts' types differ; when forced, all."""
    recipes = nn.collect_recipes(model)
    changed = 0
    for where, module in model.named_modules():
        if not isinstance(module, nn.Attention) or not module.packed:
            continue
        stacked = recipes[f"{where}.qkv_proj.weight"]
        if not context.forced(NAME) and not _types_differ(stacked, context):
            continue
        sizes = _sizes(module)
        weights = _split(stacked, sizes)
        biases: list[Recipe] | None = None
        if module.qkv_proj.bias is not None:
            biases = _split(recipes[f"{where}.qkv_proj.bias"], sizes)
        first = 0
        for i, (part, size) in enumerate(zip(PARTS, sizes, strict=True)):
            given = {"weight": weights[i]} | ({"bias": biases[i]} if biases else {})
            setattr(module, part, _part(module.qkv_proj, first, size, given))
            first += size
        del module.qkv_proj
        module.packed = False
        changed += 1
    return PassReport(name=NAME, matched=changed, changed=changed)


def _types_differ(recipe: Recipe, context: PassContext) -> bool:
    return isinstance(recipe, Concat) and len({context.quant_of(part) for part in recipe.parts}) > 1


def _sizes(module: nn.Attention) -> tuple[int, int, int]:
    kv_size = module.num_kv_heads * module.head_dim
    return module.num_heads * module.head_dim, kv_size, kv_size


def _split(recipe: Recipe, sizes: tuple[int, ...]) -> list[Recipe]:
    """The recipes of consecutive rows: a stack's own parts where there are as many."""
    if isinstance(recipe, Concat) and len(recipe.parts) == len(sizes):
        return list(recipe.parts)
    stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [Rows(recipe, stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]


def _part(stacked: nn.Linear, first: int, size: int, given: dict[str, Recipe]) -> nn.Linear:
    """Rows ``first`` to ``first + size`` of a linear layer as one of their own."""
    part = nn.Linear.__new__(nn.Linear)
    torch.nn.Module.__init__(part)
    part.in_features, part.out_features = stacked.in_features, size
    part.given_recipes = given
    part.bias = None
    for name in given:
        whole: Any = getattr(stacked, name)
        value = torch.nn.Parameter(whole[first : first + size], requires_grad=False)
        setattr(part, name, value)
    return part


PASS = Pass(
    name=NAME,
    kind="model",
    run=run,
    rewrite="qkv_proj(x).split() -> q_proj(x), k_proj(x), v_proj(x)",
    bound="float32 rounding",
    undoes="fuse_qkv",
)
