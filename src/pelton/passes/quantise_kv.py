"""quantise_kv: a KV cache of 8 bits gets scales, which writes divide by and attention multiplies with.

K and V apart, one scale a KV head (``PassContext.kv_scales``); without them codes are the values themselves.
"""

from __future__ import annotations

import torch
from torch import fx

from pelton.ir.graph import Graph, op_name
from pelton.passes.base import Pass, PassContext, PassReport

NAME = "quantise_kv"
#: Arguments of an op before its scales.
BEFORE = {"kv_write": 5, "paged_attention": 9}


def run(graph: Graph, context: PassContext) -> PassReport:
    """Give the scales of its layer to every op that reads or writes a cache."""
    nodes = [n for n in graph.calls if op_name(n) in BEFORE]
    scales: dict[int, tuple[fx.Node, fx.Node]] = {}
    changed = 0
    for node in nodes:
        layer = _layer(graph, node)
        values = context.kv_scales.get(layer)
        if values is None:
            continue
        if layer not in scales:
            k, v = (
                graph.insert_constant(f"{kind}_scale.{layer}", torch.tensor(value))
                for kind, value in zip("kv", values, strict=True)
            )
            scales[layer] = k, v
        _give(node, scales[layer])
        changed += 1
    note = "" if context.kv_scales else "caches have no scales"
    return PassReport(name=NAME, matched=len(nodes) if context.kv_scales else 0, changed=changed, note=note)


def _layer(graph: Graph, node: fx.Node) -> int:
    caches = [a for a in node.args if isinstance(a, fx.Node) and a.op == "placeholder"]
    return next(what.layer for what in map(graph.input_of, caches) if what.kind == "k_cache")


def _give(node: fx.Node, scales: tuple[fx.Node, fx.Node]) -> None:
    """Numbers that the call leaves out are written out: scales come behind them."""
    parameters = node.target._schema.arguments  # type: ignore[union-attr]
    args = list(node.args)
    for parameter in parameters[len(args) : BEFORE[op_name(node)]]:
        args.append(node.kwargs.get(parameter.name, parameter.default_value))
    node.args = (*args, *scales)
    node.kwargs = {}


PASS = Pass(
    name=NAME,
    kind="graph",
    run=run,
    rewrite="kv_write(k, v, caches), paged_attention(q, caches) -> the same with k_scale and v_scale",
    bound="nothing: the cache's type is the user's choice",
)
