"""gemm_bias: a vector that is added to a product becomes the product's bias.

Kernels add a bias while the results are in registers; as a call of its own the sum reads and writes
every result once more.
"""

from __future__ import annotations

from torch import fx

from pelton.ir.graph import Graph, argument
from pelton.ir.recipe import Flatten, Recipe, Sum
from pelton.kernels.tactic import TensorSpec
from pelton.passes.base import Pass, PassContext, PassReport
from pelton.passes.folding import name_of, set_bias
from pelton.passes.pattern import Match, call, is_weight, rewrite, tensor, weight

NAME = "gemm_bias"

PRODUCT = call("linear", tensor("x"), weight("weight"), name="product")
BIASED = call("binary", PRODUCT, weight("vector"), "add", commutes=True)


def run(graph: Graph, context: PassContext) -> PassReport:
    """Rewrite ``linear(x, w, b) + v`` to ``linear(x, w, b + v)``."""
    return rewrite(graph, context, NAME, PATTERNS)


def _fold(m: Match) -> str | None:
    graph, product, vector = m.graph, m["product"], m["vector"]
    rows = product.meta["val"].shape[1]
    if tuple(vector.meta["val"].shape) not in ((rows,), (1, rows)):
        return f"{name_of(graph, vector)} is no vector of {rows} values"
    if why := why_no_bias(graph, m.context, product, rows):
        return why
    recipe = graph.recipes[name_of(graph, vector)]
    add_to_bias(graph, product, recipe if vector.meta["val"].dim() == 1 else Flatten(recipe))
    m.root.replace_all_uses_with(product)
    graph.erase(m.root)
    return None


def why_no_bias(graph: Graph, context: PassContext, product: fx.Node, rows: int) -> str | None:
    """Why ``product`` cannot have a bias of ``rows`` values; None when it can."""
    old = argument(product, "bias")
    if old is not None and not is_weight(graph, old):
        return "its bias is computed"
    args = (*product.args[:2], TensorSpec.of_weight("float32", (rows,)))
    return None if context.supports(graph, "linear", args) else "the target has no kernel for such a product"


def add_to_bias(graph: Graph, product: fx.Node, recipe: Recipe) -> None:
    """Add ``recipe`` to the bias of ``product``."""
    old = argument(product, "bias")
    set_bias(graph, product, recipe if old is None else Sum((graph.recipes[name_of(graph, old)], recipe)))


#: What is looked for, and what is done there.
PATTERNS = ((BIASED, _fold),)

PASS = Pass(
    name=NAME,
    kind="graph",
    run=run,
    rewrite="linear(x, w) + v -> linear(x, w, v)",
    bound="float32 rounding",
)
