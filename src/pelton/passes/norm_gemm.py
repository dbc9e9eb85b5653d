"""norm_gemm: an RMS norm that one product alone reads becomes part of it.

With one token the product's kernel takes the sum of squares while it reads the row anyway, and a kernel less
is launched. In larger steps the op is the norm's kernel and then the product's, as before.
"""

from __future__ import annotations

from pelton.ir.graph import Graph
from pelton.passes.base import Pass, PassContext, PassReport
from pelton.passes.pattern import Match, call, rewrite, tensor, value, weight

NAME = "norm_gemm"

NORM = call("rms_norm", tensor("x"), weight("norm"), value("eps"), name="normed")
PRODUCT = call("linear", NORM, weight("weight"), value("bias"))
GATED = call("linear_gated", NORM, weight("weight"), value("bias"), value("kind"))


def run(graph: Graph, context: PassContext) -> PassReport:
    """Rewrite ``linear(rms_norm(x, g, eps), w, b)`` to ``norm_linear(x, w, b, g, eps)``, and ``linear_gated``
    likewise."""
    return rewrite(graph, context, NAME, PATTERNS)


def _product(m: Match) -> str | None:
    if why := _why_not(m):
        return why
    return m.fuse("norm_linear", (m["x"], m["weight"], m["bias"], m["norm"], m["eps"]))


def _gated(m: Match) -> str | None:
    if why := _why_not(m):
        return why
    args = (m["x"], m["weight"], m["bias"], m["kind"], m["norm"], m["eps"])
    return m.fuse("norm_linear_gated", args)


def _why_not(m: Match) -> str | None:
    dimensions = m["x"].meta["val"].dim()
    return f"{m['normed'].name} is of {dimensions} dimensions" if dimensions != 2 else None


#: What is looked for, and what is done there.
PATTERNS = ((PRODUCT, _product), (GATED, _gated))

PASS = Pass(
    name=NAME,
    kind="graph",
    run=run,
    rewrite="linear(rms_norm(x)) -> norm_linear(x)",
    bound="one rounding less",
    needs=("gemm_residual", "gemm_swiglu"),
)
