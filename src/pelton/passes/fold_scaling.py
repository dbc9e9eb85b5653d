"""fold_scaling: a product with a number goes into the weight beside it.

Such are the multipliers of embeddings (Gemma), of residual branches, of attention scores and of logits
(Granite). A factor goes into a weight only where that loses nothing: float32 weights, or a power of two
(which moves exponents) in bfloat16. Norm weights are always float32, so a factor of logits can go into
the norm before a quantised head.
"""

from __future__ import annotations

from torch import fx

from pelton.ir.graph import Graph, argument
from pelton.passes.base import Pass, PassContext, PassReport
from pelton.passes.folding import scale_weight, why_not_scaled
from pelton.passes.pattern import Call, Match, call, number, rewrite, tensor, value, weight

NAME = "fold_scaling"


def _times(pattern: Call) -> Call:
    return call("aten.mul.Tensor", pattern, number("factor"))


SCALED = call("aten.mul.Tensor", tensor("x"), number("factor"), name="scaled")
NORM = call(("rms_norm", "layer_norm"), value("x"), weight("norm_weight"), name="norm", shared=True)
ROWS = call(("linear", "embedding"), value("x"), weight("weight"), name="product")
HEAD = call("linear", NORM, weight("weight"), None, name="product")


def run(graph: Graph, context: PassContext) -> PassReport:
    """Rewrite ``f(x, w) * c`` to ``f(x, c w)``, ``linear(x * c, w)`` to ``linear(x, c w)``, and
    ``attention(q * c)`` to attention of another scale."""
    return rewrite(graph, context, NAME, PATTERNS)


def _into_product(m: Match) -> str | None:
    """``product * factor``: the product's weight, and its bias, are scaled."""
    product, factor = m["product"], m["factor"]
    weights = [m["weight"], *filter(None, [_bias(product)])]
    for node in weights:
        if why := why_not_scaled(m.graph, m.context, node, factor):
            return why
    for node in weights:
        scale_weight(m.graph, node, factor)
    _drop(m)
    return None


def _into_head_or_norm(m: Match) -> str | None:
    """A product without bias: its own weight or, where that cannot be, the norm's before it."""
    why = _into_product(m)
    if why is None or len(m["norm"].users) > 1:
        return why
    norm_weights = [m["norm_weight"], *filter(None, [_bias(m["norm"])])]
    if any(why_not_scaled(m.graph, m.context, node, m["factor"]) for node in norm_weights):
        return why
    for node in norm_weights:
        scale_weight(m.graph, node, m["factor"])
    _drop(m)
    return None


def _into_reader(m: Match) -> str | None:
    """``linear(x * factor, weight)``: the weight is scaled, the bias stays."""
    if why := why_not_scaled(m.graph, m.context, m["weight"], m["factor"]):
        return why
    scale_weight(m.graph, m["weight"], m["factor"])
    m.root.update_arg(0, m["x"])
    m.graph.erase(m["scaled"])
    return None


def _into_attention(m: Match) -> str | None:
    """Scores are ``scale * q.k``: the factor of q goes into the scale."""
    args = list(m.root.args)
    args[0], args[6] = m["x"], argument(m.root, "scale") * m["factor"]
    m.root.args = tuple(args)
    m.graph.erase(m["scaled"])
    return None


def _bias(node: fx.Node) -> fx.Node | None:
    parameters = [p.name for p in node.target._schema.arguments]  # type: ignore[union-attr]
    found = argument(node, "bias") if "bias" in parameters else None
    return found if isinstance(found, fx.Node) else None


def _drop(m: Match) -> None:
    m.root.replace_all_uses_with(m["product"])
    m.graph.erase(m.root)


#: What is looked for, and what is done there.
PATTERNS = (
    (_times(HEAD), _into_head_or_norm),
    (_times(ROWS), _into_product),
    (_times(call("rms_norm", value("x"), weight("weight"), name="product")), _into_product),
    (call("linear", SCALED, weight("weight")), _into_reader),
    (call("paged_attention", SCALED), _into_attention),
)

PASS = Pass(
    name=NAME,
    kind="graph",
    run=run,
    rewrite="f(x, weight) * c -> f(x, c weight); linear(x * c, weight) -> linear(x, c weight)",
    bound="float32 rounding; bit for bit where c is a power of two",
    needs=("constant_folding",),
)
