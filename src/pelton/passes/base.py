"""What passes share: their context, their report, and the two runners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pelton import nn
from pelton.ir.graph import Graph
from pelton.ir.printer import diff, to_text
from pelton.ir.recipe import Recipe
from pelton.ir.verifier import check_same_effects, effects, verify


@dataclass(frozen=True, kw_only=True)
class PassContext:
    """What a pass may know besides the model or graph."""

    quant_of: Callable[[Recipe], str]
    """Value type (dense dtype or block type) of what a recipe gives, as the checkpoint stores it."""


@dataclass(frozen=True, kw_only=True)
class PassReport:
    """What a pass did. ``matched`` places were candidates: ``changed`` ones and ``skipped`` ones."""

    name: str
    matched: int
    changed: int
    skipped: tuple[tuple[str, str], ...] = field(default=())
    """(where, why) of each match that was left alone."""


ModelPass = Callable[[nn.CausalLM, PassContext], PassReport]
"""Rewrites modules and weight recipes, before tracing."""
GraphPass = Callable[[Graph, PassContext], PassReport]
"""Rewrites the graph in place."""


def run_model_passes(
    passes: tuple[ModelPass, ...], model: nn.CausalLM, context: PassContext
) -> list[PassReport]:
    """Run ``passes`` over ``model`` in order."""
    return [run(model, context) for run in passes]


def run_graph_passes(
    passes: tuple[GraphPass, ...],
    graph: Graph,
    context: PassContext,
    explain: Callable[[str], None] | None = None,
) -> list[PassReport]:
    """Run ``passes`` over ``graph`` in order, each followed by the verifier.

    ``explain`` gets the difference that each pass made, as text. Raises ``BuildError`` when a pass
    leaves an invalid graph or changes the KV writes.
    """
    reports = []
    for run in passes:
        writes, before = effects(graph), to_text(graph) if explain else ""
        report = run(graph, context)
        verify(graph)
        check_same_effects(writes, graph, report.name)
        if explain and report.changed:
            explain(f"{report.name}\n{diff(before, to_text(graph))}")
        reports.append(report)
    graph.module.recompile()
    return reports
