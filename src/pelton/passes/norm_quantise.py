"""norm_quantise: a norm whose result is only quantised gives the quantised rows itself.

The normalised float32 rows are then neither written nor read: 4 bytes a value each way.
"""

from __future__ import annotations

from torch import fx

from pelton.ir.graph import Graph, op_name
from pelton.passes.base import Pass, PassContext, PassReport
from pelton.passes.pattern import Match, call, item, rewrite, tensor, value

NAME = "norm_quantise"

NORM = call("rms_norm", tensor("x"), value("weight"), value("eps"))
ADD_NORM = call(
    "add_rms_norm",
    tensor("x"),
    tensor("residual"),
    value("weight"),
    value("eps"),
    name="norm",
    shared=True,
)


def run(graph: Graph, context: PassContext) -> PassReport:
    """Rewrite ``quantize_q8`` of ``rms_norm`` or ``add_rms_norm`` to ``rms_norm_q8``, ``add_rms_norm_q8``."""
    return rewrite(graph, context, NAME, PATTERNS)


def _fuse_with_sum(m: Match) -> str | None:
    norm: fx.Node = m["norm"]
    sums = [user for user in norm.users if op_name(user) == "getitem" and user.args[1] == 1]
    args = (m["x"], m["residual"], m["weight"], m["eps"])
    # At the norm's place: the sum's readers may come before the quantisation.
    why = m.fuse("add_rms_norm_q8", args, results={m.root: 0, **dict.fromkeys(sums, 1)}, at=norm)
    if why is None:
        m.graph.erase(norm)
    return why


#: What is looked for, and what is done there.
PATTERNS = (
    (call("quantize_q8", NORM), lambda m: m.fuse("rms_norm_q8", (m["x"], m["weight"], m["eps"]))),
    (call("quantize_q8", item(ADD_NORM, 0)), _fuse_with_sum),
)

PASS = Pass(
    name=NAME,
    kind="graph",
    run=run,
    rewrite="quantize_q8(rms_norm(x)) -> rms_norm_q8(x); the same with add_rms_norm",
    bound="bit for bit",
    needs=("add_rms_norm", "move_quantise"),
    fast=False,
)
