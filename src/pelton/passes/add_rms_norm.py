"""add_rms_norm: a sum and the norm of it become one op that returns both.

The residual stream is added to and then normalised before every block: fused, it is read once.
"""

from __future__ import annotations

from pelton.ir.graph import Graph
from pelton.passes.base import Pass, PassContext, PassReport
from pelton.passes.pattern import Match, call, item, rewrite, tensor, value

NAME = "add_rms_norm"

SUM = call("aten.add.Tensor", tensor("stream"), tensor("branch"), name="sum", shared=True)
NORM_OF_SUM = call("rms_norm", SUM, value("weight"), value("eps"))
NORM_OF_NUMBER = call("rms_norm", call("aten.add.Tensor", name="sum", shared=True))
#: A sum that an earlier norm took.
SECOND_NORM = call("rms_norm", item(call("add_rms_norm", shared=True), 1, name="sum", shared=True))


def run(graph: Graph, context: PassContext) -> PassReport:
    """Rewrite ``s = aten.add(a, b); y = rms_norm(s, w, eps)`` to ``y, s = add_rms_norm(b, a, w, eps)``."""
    return rewrite(graph, context, NAME, PATTERNS)


def _fuse(m: Match) -> str | None:
    total = m["sum"]
    if total.meta["val"].dim() != 2:
        return f"{total.name} has {total.meta['val'].dim()} dimensions"
    args = (m["branch"], m["stream"], m["weight"], m["eps"])
    # At the sum's place: its other readers may come before the norm.
    return m.fuse("add_rms_norm", args, results={m.root: 0, total: 1}, at=total)


#: What is looked for, and what is done there.
PATTERNS = (
    (NORM_OF_SUM, _fuse),
    (NORM_OF_NUMBER, lambda m: f"{m['sum'].name} adds a number"),
    (SECOND_NORM, lambda m: f"{m['sum'].name} is already fused with another norm"),
)

PASS = Pass(
    name=NAME,
    kind="graph",
    run=run,
    rewrite="s = x + y; rms_norm(s) -> add_rms_norm(x, y) -> (norm, s)",
    bound="bit for bit",
    needs=("early_take_rows",),
)
