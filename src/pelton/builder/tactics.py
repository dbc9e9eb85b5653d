"""Which tactic runs each call, and which layout each weight gets.

A weight is packed once, so all calls that use it (a tied table is embedding and head) must agree on
its layout: the one with the highest summed priority that all of them support. Without timing, a
call then takes the supporting tactic of the highest priority.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pelton.builder.calls import Call, Root, Value
from pelton.kernels.tactic import NodeSpec, Tactic, TensorSpec

ROWS = "rows"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The outcome: a tactic per call (None: only the reference runs it), a layout per weight."""

    tactics: tuple[Tactic | None, ...]
    specs: tuple[NodeSpec, ...]
    layouts: Mapping[Root, str]
    candidates: int
    """How many (call, tactic) pairs were considered."""


def choose(
    calls: Sequence[Call], quants: Mapping[Root, str], tactics: Mapping[str, Tactic], activations: str
) -> Choice:
    """``quants``: stored value type of each weight and constant."""
    specs = tuple(node_spec(call, quants, activations) for call in calls)
    candidates = [supporting(spec, tactics) for spec in specs]
    layouts = _choose_layouts(calls, quants, candidates)
    chosen = [
        next((t for t in options if _fits(call, t, layouts)), None)
        for call, options in zip(calls, candidates, strict=True)
    ]
    return Choice(tactics=tuple(chosen), specs=specs, layouts=layouts, candidates=sum(map(len, candidates)))


def supporting(spec: NodeSpec, tactics: Mapping[str, Tactic]) -> list[Tactic]:
    """The tactics that can run such a call, best first."""
    found = (t for t in tactics.values() if t.op == spec.op and t.device == "cpu" and t.supports(spec))
    return sorted(found, key=lambda t: (-t.priority, t.name))


def node_spec(call: Call, quants: Mapping[Root, str], activations: str) -> NodeSpec:
    """The call as ``Tactic.supports`` sees it."""

    def spec(value: Value | None) -> TensorSpec | None:
        if value is None:
            return None
        quant = quants.get(value.root)
        if quant is None:
            return TensorSpec(dtype=value.root.dtype, shape=value.shape)
        return TensorSpec.of_weight(quant, value.shape)

    inputs = tuple(spec(value) for value in call.inputs)
    return NodeSpec(op=call.op.name, inputs=inputs, attrs=call.attrs, activations=activations)


def _choose_layouts(
    calls: Sequence[Call], quants: Mapping[Root, str], candidates: Sequence[Sequence[Tactic]]
) -> dict[Root, str]:
    scores: dict[Root, dict[str, int] | None] = dict.fromkeys(quants)
    for call, options in zip(calls, candidates, strict=True):
        for index, value in enumerate(call.inputs):
            if value is None or value.root not in quants or not options:
                continue
            mine: dict[str, int] = {}
            for tactic in reversed(options):
                mine[tactic.weight_layouts.get(index, ROWS)] = tactic.priority
            before = scores[value.root]
            scores[value.root] = (
                mine
                if before is None
                else {layout: before[layout] + mine[layout] for layout in before if layout in mine}
            )
    layouts = {}
    for root, by_layout in scores.items():
        # No tactic for any user (None) or none in common ({}): the references read rows.
        layouts[root] = max(by_layout, key=lambda k: (by_layout[k], k)) if by_layout else ROWS
    return layouts


def _fits(call: Call, tactic: Tactic, layouts: Mapping[Root, str]) -> bool:
    return all(
        tactic.weight_layouts.get(index, ROWS) == layouts[value.root]
        for index, value in enumerate(call.inputs)
        if value is not None and value.root in layouts
    )
