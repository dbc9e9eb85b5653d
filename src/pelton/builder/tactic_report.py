"""What was considered for each kind of call and what was taken: rows of the report."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pelton.builder.report import TacticReport
from pelton.builder.tactics import Choice, Decision


def tactic_reports(choice: Choice) -> tuple[TacticReport, ...]:
    """A row per op, shapes and bucket; one for all buckets where nothing was timed."""
    rows: dict[str, tuple[TacticReport, int]] = {}
    for decisions in choice.decisions:
        for row in _rows(decisions):
            key = repr(row)
            rows[key] = row, rows.get(key, (row, 0))[1] + 1
    reports = [msgspec.structs.replace(row, calls=n) for row, n in rows.values()]
    return tuple(sorted(reports, key=lambda r: (r.op, r.max_tokens, r.shape, r.tactic)))


def _rows(decisions: Sequence[Decision]) -> list[TacticReport]:
    tactics = {d.tactic.name if d.tactic else "" for d in decisions}
    if len(tactics) == 1 and not any(d.times for d in decisions):
        return [_row(decisions[-1], 0)]
    return [_row(d, d.bucket.max_tokens) for d in decisions]


def _row(decision: Decision, max_tokens: int) -> TacticReport:
    return TacticReport(
        op=decision.signature.op,
        tactic=decision.tactic.name if decision.tactic else "",
        calls=0,
        shape=decision.signature.shape,
        max_tokens=max_tokens,
        reason=decision.reason,
        microseconds=dict(sorted(decision.times.items())),
        rejected=dict(sorted(decision.rejected.items())),
    )
