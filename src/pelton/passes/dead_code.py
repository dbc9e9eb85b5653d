"""dead_code: drop what nobody reads. KV writes are effects and stay, and so do the step's inputs."""

from __future__ import annotations

from pelton.ir.graph import Graph
from pelton.passes.base import Pass, PassContext, PassReport

NAME = "dead_code"


def run(graph: Graph, context: PassContext) -> PassReport:
    """Erase calls without readers, then weights and constants without readers."""
    changed = 0
    for node in reversed(graph.nodes):
        if node.users or node.op not in ("call_function", "placeholder"):
            continue
        if node.op == "placeholder" and graph.input_of(node).kind not in ("weight", "constant"):
            continue
        if not graph.is_effect(node):
            graph.erase(node)
            changed += 1
    return PassReport(name=NAME, matched=changed, changed=changed)


PASS = Pass(
    name=NAME,
    kind="graph",
    run=run,
    rewrite="what nobody reads -> nothing",
    bound="bit for bit",
)
