"""early_take_rows: compute the end of the network only for the rows whose logits are wanted.

A step has T tokens but usually N < T rows of logits: one per sequence. What lies between the last
attention and ``take_rows`` treats every row by itself, so the rows can be taken before it: in a
prefill, the last layer's output projection and MLP then cost N rows instead of T.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from pelton.ir.aten import COMPUTE
from pelton.ir.graph import Graph, op_name
from pelton.ir.verifier import VIEWS
from pelton.passes.base import Pass, PassContext, PassReport

NAME = "early_take_rows"
ROW_WISE = frozenset(
    {
        "linear", "rms_norm", "layer_norm", "add_rms_norm", "activation", "gated_activation", "softcap",
        "scale", "unary", "binary", "binary_scalar", "take_columns",
    }
)  # fmt: skip
"""Ops whose result's row t depends on row t of their inputs (and on weights) alone."""


def run(graph: Graph, context: PassContext) -> PassReport:
    """Move each ``take_rows`` up, through every row-wise node that only it reads in the end."""
    matched, changed, skipped = 0, 0, []
    for take in graph.calls:
        if op_name(take) != "take_rows":
            continue
        matched += 1
        narrow = _read_by_rows_only(graph, take)
        if not narrow:
            skipped.append((take.name, f"{take.args[0]} is read elsewhere or is not row-wise"))
            continue
        taken: dict[fx.Node, fx.Node] = {}
        for node in narrow:
            for source in node.all_input_nodes:
                if source in narrow or source in taken or not _has_rows(graph, source):
                    continue
                taken[source] = graph.insert_call("take_rows", (source, take.args[1]), like=take, before=node)
            for source, rows in taken.items():
                node.replace_input_with(source, rows)
            graph.infer(node)
        take.replace_all_uses_with(take.args[0])  # type: ignore[arg-type]
        graph.erase(take)
        changed += 1
    return PassReport(name=NAME, matched=matched, changed=changed, skipped=tuple(skipped))


def _read_by_rows_only(graph: Graph, take: fx.Node) -> list[fx.Node]:
    """Row-wise nodes with rows T whose every reader is ``take`` or such a node, in order."""
    narrow: set[fx.Node] = set()
    for node in reversed(graph.calls):
        if node is take or not node.users or not _is_row_wise(graph, node):
            continue
        if all(user is take or user in narrow for user in node.users):
            narrow.add(node)
    # Of a split whose other parts are read elsewhere, rows are taken of the part.
    parts = {node for node in narrow if op_name(node) == "getitem" and node.args[0] not in narrow}
    return [node for node in graph.calls if node in narrow and node not in parts]


def _is_row_wise(graph: Graph, node: fx.Node) -> bool:
    known = op_name(node) in ROW_WISE or node.target in VIEWS or node.target in COMPUTE
    # Where all is (T, D) or a weight, a view cannot have merged rows with heads.
    inputs = node.all_input_nodes
    return known and _has_rows(graph, node) and all(_has_rows(graph, n) or _fixed(graph, n) for n in inputs)


def _has_rows(graph: Graph, node: fx.Node) -> bool:
    """Whether the node's value, or every one of its values, is (T, D)."""
    return all(v is not None and v.dim() == 2 and graph.shape(v)[0] == "T" for v in _values(node))


def _fixed(graph: Graph, node: fx.Node) -> bool:
    """Whether no size of the node's values is dynamic, as of weights."""
    return all(isinstance(d, int) for v in _values(node) for d in graph.shape(v))


def _values(node: fx.Node) -> list[Any]:
    value = node.meta["val"]
    return list(value) if isinstance(value, list | tuple) else [value]


PASS = Pass(
    name=NAME,
    kind="graph",
    run=run,
    rewrite="take_rows(f(x)) -> f(take_rows(x)) for row-wise f",
    bound="bit for bit",
)
