"""add_rms_norm: a sum and the norm of it become one op that returns both.

The residual stream is added to and then normalised before every block: fused, it is read once.
"""

from __future__ import annotations

import torch
from torch import fx

from pelton.ir.graph import Graph, op_name
from pelton.passes.base import Pass, PassContext, PassReport

NAME = "add_rms_norm"


def run(graph: Graph, context: PassContext) -> PassReport:
    """Rewrite ``s = aten.add(a, b); y = rms_norm(s, w, eps)`` to ``y, s = add_rms_norm(b, a, w, eps)``."""
    matched, changed, skipped = 0, 0, []
    for norm in graph.calls:
        if op_name(norm) != "rms_norm":
            continue
        total, weight, eps = norm.args
        assert isinstance(total, fx.Node)
        if total.target is not torch.ops.aten.add.Tensor:
            # A sum that an earlier norm took is a second match, left alone.
            if _is_fused_sum(total):
                matched += 1
                skipped.append((norm.name, f"{total.name} is already fused with another norm"))
            continue
        matched += 1
        stream, branch = total.args
        if not isinstance(branch, fx.Node) or not isinstance(stream, fx.Node):
            skipped.append((norm.name, f"{total.name} adds a number"))
            continue
        if total.meta["val"].dim() != 2:
            skipped.append((norm.name, f"{total.name} has {total.meta['val'].dim()} dimensions"))
            continue
        # At the sum's place: its other readers may come before the norm.
        fused = graph.insert_call("add_rms_norm", (branch, stream, weight, eps), like=norm, before=total)
        normed, summed = graph.insert_getitem(fused, 0), graph.insert_getitem(fused, 1)
        norm.replace_all_uses_with(normed)
        total.replace_all_uses_with(summed)
        graph.erase(norm)
        graph.erase(total)
        changed += 1
    return PassReport(name=NAME, matched=matched, changed=changed, skipped=tuple(skipped))


def _is_fused_sum(node: fx.Node) -> bool:
    return op_name(node) == "getitem" and op_name(node.args[0]) == NAME and node.args[1] == 1  # type: ignore[arg-type]


PASS = Pass(
    name=NAME,
    kind="graph",
    run=run,
    rewrite="s = x + y; rms_norm(s) -> add_rms_norm(x, y) -> (norm, s)",
    bound="bit for bit",
    needs=("early_take_rows",),
)
