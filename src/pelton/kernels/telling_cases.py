"""Which of the cases of CUDA tactics tell the most, where all would take too long."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pelton.kernels.conformance import split_arguments
from pelton.kernels.conformance_cuda import Case

#: Ops with large kernels, by parts of their names.
_LARGE = ("linear", "attention")


def telling(cases: Iterable[Case], most: int = 4) -> list[Case]:
    """At most ``most`` cases of each tactic and type: the smallest of each type of weight, kind of step and
    rounding of inputs and keys, then some of other sizes; of attention one more, so that steps of both kinds
    are there with sinks and without. All cases of ops whose kernels are small, as those take no time to
    compile."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.tactic.name, case.dtype), []).append(case)
    chosen = []
    for group in groups.values():
        if not any(part in group[0].op.name for part in _LARGE):
            chosen += group
            continue
        group.sort(key=_numbers)
        kinds: dict[tuple[object, ...], Case] = {}
        for case in group:
            attrs = split_arguments(case.op, case.sample.args)[1]
            static = attrs.get("x_codes"), attrs.get("y_codes"), case.sample.args[0].dtype
            given = _is_given(case, "k_shift"), _is_given(case, "sinks")
            quants = sorted(w.quant for w in case.packed.values())
            kinds.setdefault((case.decode, *static, *given, *quants), case)
        sinks = any(_is_given(case, "sinks") for case in group)
        own = evenly(list(kinds.values()), most + sinks)
        names = {str(case) for case in own}
        rest = [case for case in group[: max(most, len(group) * 3 // 4)] if str(case) not in names]
        chosen += own + evenly(rest, most - len(own))
    return chosen


def _is_given(case: Case, name: str) -> bool:
    names = (p.name for p in case.op.torch_op._schema.arguments)
    return any(n == name and a is not None for n, a in zip(names, case.sample.args, strict=False))


def _numbers(case: Case) -> int:
    return sum(a.numel() for a in case.sample.args if isinstance(a, torch.Tensor))


def evenly(cases: list[Case], count: int) -> list[Case]:
    """``count`` of them, the first among them, evenly spaced."""
    count = min(count, len(cases))
    return [cases[i * len(cases) // count] for i in range(count)]
