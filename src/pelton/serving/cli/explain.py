"""``pelton build --explain``: what passes change as they run, and why tactics were chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pelton.serving.cli.tables import show

if TYPE_CHECKING:
    from pelton.builder.report import BuildReport, PassReport, TacticReport


def explain_pass(text: str) -> None:
    """Print a pass's name and diff; hunks of layers that change alike stand once."""
    from pelton.ir.printer import condense

    name, _, changes = text.partition("\n")
    click.echo(f"\n== {name}")
    for line in condense(changes).splitlines():
        colour = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1])
        click.secho(line, fg=colour)


def explain_choices(report: BuildReport) -> None:
    """Print why passes left places alone, and which tactic runs each op and why."""
    reasons = [(p.name, *reason) for p in report.passes for reason in _reasons(p)]
    if reasons:
        click.echo()
        show("left alone", reasons, header=("pass", "places", "why"))
    click.echo()
    rows = [
        (
            t.op,
            t.shape,
            t.tactic or "reference",
            f"<= {t.max_tokens}" if t.max_tokens else "any",
            t.calls,
            _why(t),
        )
        for t in report.tactics
    ]
    show("tactics", rows, header=("op", "shape", "tactic", "tokens", "calls", "why"))
    click.echo()


def _reasons(p: PassReport) -> list[tuple[str, str]]:
    found = [("all", p.note)] if p.note else []
    return found + [(str(n), why) for why, n in p.skipped.items()]


def _why(t: TacticReport) -> str:
    if not t.tactic:
        return "no kernel of this machine supports it"
    parts = [{"default": "first by priority"}.get(t.reason, t.reason)]
    mine = t.microseconds.get(t.tactic)
    if mine is not None:
        parts.append(f"{mine:.1f} us")
    others = sorted((us, name) for name, us in t.microseconds.items() if name != t.tactic)
    parts += [f"{name} {us:.1f} us" for us, name in others]
    parts += [f"not {name}: {why}" for name, why in t.rejected.items()]
    return "; ".join(parts)
