"""gemm_residual: a product and the sum with the residual stream become one op.

The kernel adds the residual where it has the product in registers: nothing is written and read again for it.
Where ``add_rms_norm`` took the sum, the norm stays behind, and ``norm_gemm`` may give it to the next product.
"""

from __future__ import annotations

from torch import fx

from pelton.ir.graph import Graph, op_name
from pelton.passes.base import Pass, PassContext, PassReport
from pelton.passes.pattern import Match, call, rewrite, tensor, value, weight

NAME = "gemm_residual"

PRODUCT = call("linear", tensor("x"), weight("weight"), value("bias"), name="product")
SUM = call("aten.add.Tensor", PRODUCT, tensor("residual"), commutes=True)
NORM_OF_SUM = call("add_rms_norm", PRODUCT, tensor("residual"), value("norm"), value("eps"), commutes=True)


def run(graph: Graph, context: PassContext) -> PassReport:
    """Rewrite ``linear(x, w, b) + r`` to ``linear_add(x, w, b, r)``, and ``add_rms_norm(linear(x, w, b), r,
    g, eps)`` to ``rms_norm(linear_add(x, w, b, r), g, eps)``."""
    return rewrite(graph, context, NAME, PATTERNS)


def _add(m: Match) -> str | None:
    if m.graph.shape(m["residual"].meta["val"]) != m.graph.shape(m["product"].meta["val"]):
        return f"{m['residual'].name} is repeated over {m['product'].name}"
    return m.fuse("linear_add", _arguments(m))


def _add_before_norm(m: Match) -> str | None:
    if not m.context.supports(m.graph, "linear_add", _arguments(m)):
        return "the target has no kernel for linear_add of these types"
    graph, root = m.graph, m.root
    if not m.context.supports(graph, "rms_norm", (m["residual"], m["norm"], m["eps"])):
        return "the target has no kernel for the norm alone"
    total = graph.insert_call("linear_add", _arguments(m), like=m["product"], before=root)
    normed = graph.insert_call("rms_norm", (total, m["norm"], m["eps"]), like=root, before=root)
    for item in tuple(root.users):
        assert op_name(item) == "getitem"
        item.replace_all_uses_with((normed, total)[int(item.args[1])])  # type: ignore[arg-type]
        graph.erase(item)
    m.erase()
    return None


def _arguments(m: Match) -> tuple[fx.Node, fx.Node, fx.Node | None, fx.Node]:
    return m["x"], m["weight"], m["bias"], m["residual"]


#: What is looked for, and what is done there.
PATTERNS = ((SUM, _add), (NORM_OF_SUM, _add_before_norm))

PASS = Pass(
    name=NAME,
    kind="graph",
    run=run,
    rewrite="linear(x) + r -> linear_add(x, r)",
    bound="one rounding less",
    needs=("add_rms_norm", "fuse_products", "gemm_bias"),
)
