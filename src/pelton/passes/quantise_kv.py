"""quantise_kv: a KV cache of 8 bits gets scales, which writes divide by and attention multiplies with.

Writes also take from the keys a vector that ``PassContext.key_rounding`` has of their layer, the same from
all keys of a head. Every score of a query loses the same number by that, so softmax gives what it gave. And
they round one channel of a key to its other neighbour where the queries of the head lose less by that.

K and V apart, one scale a KV head (``PassContext.kv_scales``); without them codes are the values themselves.
"""

from __future__ import annotations

import torch
from torch import fx

from pelton.ir.graph import Graph, argument, op_name
from pelton.passes.base import Pass, PassContext, PassReport
from pelton.passes.pattern import with_arguments

NAME = "quantise_kv"
#: Ops that have scales of caches.
SCALED = ("kv_write", "paged_attention")


def run(graph: Graph, context: PassContext) -> PassReport:
    """Give the scales of its layer to every op that reads or writes a cache."""
    nodes = [n for n in graph.calls if op_name(n) in SCALED]
    seen = {_layer(graph, n) for n in nodes if op_name(n) == "paged_attention" and _sees_shifts(n)}
    constants: dict[int, dict[str, fx.Node]] = {}
    changed = 0
    for node in nodes:
        layer = _layer(graph, node)
        values = context.kv_scales.get(layer)
        if values is None:
            continue
        if layer not in constants:
            given = {f"{kind}_scale": torch.tensor(value) for kind, value in zip("kv", values, strict=True)}
            if layer in context.key_rounding and layer not in seen:
                shift, queries = map(torch.from_numpy, context.key_rounding[layer])
                given |= {"k_shift": shift, "k_queries": queries}
            constants[layer] = {n: graph.insert_constant(f"{n}.{layer}", t) for n, t in given.items()}
        node.args, node.kwargs = with_arguments(node, **constants[layer]), {}
        changed += 1
    note = "" if context.kv_scales else "caches have no scales"
    if as_they_are := len(seen & context.key_rounding.keys()):
        note = f"keys of {as_they_are} layers are rounded as they are: their softmax would see a shift"
    return PassReport(name=NAME, matched=len(nodes) if context.kv_scales else 0, changed=changed, note=note)


def _sees_shifts(attention: fx.Node) -> bool:
    """Whether its softmax changes where all scores of a query lose the same number: capped ones no longer
    do, and a sink loses nothing."""
    return argument(attention, "softcap") > 0 or argument(attention, "sinks") is not None


def _layer(graph: Graph, node: fx.Node) -> int:
    caches = [a for a in node.args if isinstance(a, fx.Node) and a.op == "placeholder"]
    return next(what.layer for what in map(graph.input_of, caches) if what.kind == "k_cache")


PASS = Pass(
    name=NAME,
    kind="graph",
    run=run,
    rewrite="kv_write(k, v), paged_attention(q) -> with k_scale, v_scale; writes with k_shift, k_queries",
    bound="nothing: the cache's type is the user's choice",
)
