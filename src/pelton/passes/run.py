"""Runs passes in order, checks what they leave, and keeps what they changed as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pelton import nn
from pelton.errors import ConfigError
from pelton.ir.graph import Graph
from pelton.ir.printer import diff, recipe_text, to_text
from pelton.ir.tensors import ValuesNotRead
from pelton.ir.verifier import check_same_effects, effects, verify
from pelton.passes.base import Pass, PassContext, PassReport

#: How the note of a pass begins that a dry run could not try.
NOT_TRIED = "not tried"

Explain = Callable[[str], None]
"""Gets the name of each pass that changed something, and its diff."""


def run_model_passes(
    passes: Sequence[Pass], model: nn.CausalLM, context: PassContext, explain: Explain | None = None
) -> list[PassReport]:
    """Run the model passes among ``passes`` over ``model`` in order.

    A report for each, in which ``note`` says why one did not run. Raises ``ConfigError`` where a forced
    pass was refused a place or found none.
    """
    text = model_text(model)
    reports = []
    for p in passes:
        if p.kind != "model":
            continue
        report = _run(p, passes, model, context)
        if report.changed:
            before, text = text, model_text(model)
            report = _explained(report, before, text, explain)
        reports.append(report)
    return reports


def run_graph_passes(
    passes: Sequence[Pass], graph: Graph, context: PassContext, explain: Explain | None = None
) -> list[PassReport]:
    """Run the graph passes among ``passes`` over ``graph`` in order, each followed by the verifier.

    As ``run_model_passes``; besides, raises ``BuildError`` when a pass leaves an invalid graph or
    changes the KV writes.
    """
    text = to_text(graph)
    reports = []
    for p in passes:
        if p.kind != "graph":
            continue
        writes = effects(graph)
        report = _run(p, passes, graph, context)
        if not report.note:
            verify(graph)
            check_same_effects(writes, graph, report.name)
        if report.changed:
            before, text = text, to_text(graph)
            report = _explained(report, before, text, explain)
        reports.append(report)
    graph.module.recompile()
    return reports


def model_text(model: nn.CausalLM) -> str:
    """One line a parameter: its name, shape and recipe."""
    recipes = nn.collect_recipes(model)
    return "".join(
        f"{name} {list(model.get_parameter(name).shape)} = {recipe_text(recipe)}\n"
        for name, recipe in recipes.items()
    )


def _run(p: Pass, passes: Sequence[Pass], target: nn.CausalLM | Graph, context: PassContext) -> PassReport:
    if note := _why_not(p, passes, context):
        return PassReport(name=p.name, matched=0, changed=0, note=note)
    try:
        report = p.run(target, context)
    except ValuesNotRead as tensor:
        note = f"{NOT_TRIED}: it compares values of {tensor}, which a dry run does not read"
        return PassReport(name=p.name, matched=0, changed=0, note=note)
    if context.forced(p.name):
        if report.skipped:
            where, why = report.skipped[0]
            raise ConfigError(
                f"passes {p.name}=force: {where}: {why}; with {p.name}=auto it applies where it can"
            )
        if not report.changed:
            raise ConfigError(
                f"passes {p.name}=force: nothing in this model fits ({p.rewrite}); leave the setting out"
            )
    return report


def _why_not(p: Pass, passes: Sequence[Pass], context: PassContext) -> str:
    mode = context.modes.get(p.name, "auto")
    if mode == "off":
        return "switched off"
    if mode == "force":
        return ""
    if not p.default:
        return "runs only when forced"
    if context.fast and not p.fast:
        return "not part of a fast build"
    by = next((q.name for q in passes if q.undoes == p.name and context.forced(q.name)), None)
    return f"{by} is forced" if by else ""


def _explained(report: PassReport, before: str, after: str, explain: Explain | None) -> PassReport:
    changes = diff(before, after)
    if explain:
        explain(f"{report.name}\n{changes}")
    return replace(report, diff=changes)
