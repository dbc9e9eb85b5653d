"""fuse_products: products of one tensor become one, as fuse_qkv and fuse_gate_mlp do with modules.

Models that are imported, or written without ``nn.Attention`` and ``nn.GatedMLP``, reach the graph with a
product each for q, k and v, for gate and up. Their weights are stacked by recipe, as there; the results are
views of one tensor. Gate and up of a gated activation are stacked by themselves, gate first, so that
``gemm_swiglu`` takes them. Weights of different types stay apart, and those of one type among them are
joined: q and k, where GGUF's K-quants give v more bits. Where a module pass is switched off, its kind
stays apart here too.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import fx

from pelton.ir.graph import Graph, argument, op_name
from pelton.ir.recipe import Concat, Full
from pelton.ir.verifier import VIEWS
from pelton.kernels.tactic import TensorSpec
from pelton.passes.base import Pass, PassContext, PassReport
from pelton.passes.folding import name_of, stored
from pelton.passes.pattern import is_weight

NAME = "fuse_products"
SPLIT: Any = torch.ops.aten.split_with_sizes.default


def run(graph: Graph, context: PassContext) -> PassReport:
    """Rewrite ``linear(x, a), linear(x, b)`` to ``split(linear(x, [a; b]))``."""
    matched, changed, skipped = 0, 0, []
    for kind, products in _groups(graph, context):
        matched += 1
        why = _switched_off(context, kind) or _fuse(graph, context, products)
        if why is None:
            changed += 1
        else:
            skipped.append((products[0].name, why))
    return PassReport(name=NAME, matched=matched, changed=changed, skipped=tuple(skipped))


def _groups(graph: Graph, context: PassContext) -> list[tuple[str, list[fx.Node]]]:
    """Products of one tensor with weights of one type, two and more: pairs of gate and up, and what is
    left, by the pass that stacks such modules."""
    by_input: dict[Any, list[fx.Node]] = {}
    for node in graph.calls:
        if op_name(node) == "linear" and is_weight(graph, node.args[1]):
            x, weight = node.args[:2]
            assert isinstance(weight, fx.Node)
            quant = context.quant_of(graph.recipes[name_of(graph, weight)])
            by_input.setdefault((x, quant, stored(graph, context, weight)), []).append(node)
    groups: list[tuple[str, list[fx.Node]]] = []
    for products in by_input.values():
        rest = list(products)
        for gated in [u for p in products for u in p.users if op_name(u) == "gated_activation"]:
            pair: list[Any] = [gated.args[0], gated.args[1]]
            if pair[0] is not pair[1] and all(p in rest for p in pair):
                groups.append(("fuse_gate_mlp", pair))
                rest = [p for p in rest if p not in pair]
        if len(rest) > 1:
            groups.append(("fuse_qkv", rest))
    return groups


def _switched_off(context: PassContext, kind: str) -> str | None:
    if context.modes.get(kind) == "off":
        return f"{kind} is switched off"
    if kind == "fuse_qkv" and context.forced("unfuse_qkv_gemm"):
        return "unfuse_qkv_gemm is forced"
    return None


def _fuse(graph: Graph, context: PassContext, products: list[fx.Node]) -> str | None:
    weights: list[Any] = [p.args[1] for p in products]
    names = [name_of(graph, w) for w in weights]
    recipes = [graph.recipes[name] for name in names]
    for weight, name in zip(weights, names, strict=True):
        if len(weight.users) > 1:
            return f"{name} is read elsewhere too"
    sizes = [w.meta["val"].shape[0] for w in weights]
    biases = [argument(p, "bias") for p in products]
    if any(b is not None and not is_weight(graph, b) for b in biases):
        return "a bias is computed"
    x, total = products[0].args[0], sum(sizes)
    bias_spec = TensorSpec.of_weight("float32", (total,)) if any(biases) else None
    columns = weights[0].meta["val"].shape[1]
    spec = TensorSpec.of_weight(stored(graph, context, weights[0]), (total, columns))
    if not context.supports(graph, "linear", (x, spec, bias_spec)):
        return "the target has no kernel for the product of all"
    weight = graph.insert_weight(_stacked(names), Concat(tuple(recipes)), weights[0], (total, columns))
    args = (x, weight, None)
    if bias_spec is not None:
        parts = [
            Full(n, 0.0) if b is None else graph.recipes[name_of(graph, b)]
            for b, n in zip(biases, sizes, strict=True)
        ]
        name = _stacked(names).removesuffix("weight") + "bias"
        args = (x, weight, graph.insert_weight(name, Concat(tuple(parts)), weight, (total,)))
    _replace(graph, products, args, sizes)
    return None


def _views(node: fx.Node) -> list[fx.Node]:
    """Views of the node's result, each after what it views."""
    found = []
    for user in node.users:
        if user.target in VIEWS:
            found += [user, *_views(user)]
    return found


def _common(names: list[str]) -> str:
    """The path that dotted names begin with."""
    paths = [name.split(".") for name in names]
    same = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in same)


def _stacked(names: list[str]) -> str:
    """``a.q_proj.weight``, ``a.k_proj.weight`` -> ``a.q_proj+k_proj.weight``."""
    prefix = _common(names) + "."
    inner = [name.removeprefix(prefix).removesuffix(".weight") for name in names]
    return f"{prefix}{'+'.join(inner)}.weight".removeprefix(".")


def _replace(graph: Graph, products: list[fx.Node], args: tuple[Any, ...], sizes: list[int]) -> None:
    first = next(node for node in graph.calls if node in products)
    fused = graph.insert_call("linear", args, like=first, before=first)
    fused.meta["where"] = _common([p.meta["where"] for p in products])
    with graph.fx_graph.inserting_after(fused):
        split = graph.fx_graph.call_function(SPLIT, (fused, sizes, -1))
    split.meta = {"val": SPLIT(fused.meta["val"], sizes, -1), "where": fused.meta["where"]}
    views = [view for product in products for view in _views(product)]
    for index, product in enumerate(products):
        product.replace_all_uses_with(graph.insert_getitem(split, index))
        graph.erase(product)
    for view in views:
        graph.infer(view)


PASS = Pass(
    name=NAME,
    kind="graph",
    run=run,
    rewrite="linear(x, a), linear(x, b) -> split(linear(x, [a; b]))",
    bound="float32 rounding",
    needs=("cse", "gemm_bias", "attention_bias", "early_take_rows"),
)
