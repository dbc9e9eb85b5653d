"""Which tactic runs each call in each bucket, and which layout each weight gets.

1. Candidates of a call: tactics that support it, or what the user chose for its op.
2. A weight is packed once, so all calls that use it (a tied table is embedding and head) must agree on
   its layout; candidates that want a layout which another user of the weight has no tactic for go.
3. Where candidates remain to choose among, they are timed at each bucket (``measure``).
4. A weight takes the layout in which its calls are fastest over all buckets. Buckets weigh the same: a
   bucket's cost is its calls' time relative to the best layout there.
5. Then each call takes, in each bucket, the fastest tactic of that layout. Times within ``TIE`` are
   equal, and the higher priority wins, as it does wherever times are not known.

So with the same times the outcome is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pelton.builder.calls import Call, Root, Value
from pelton.builder.measure import Measurements
from pelton.builder.plugins import Plugged, PluginConfig, apply_plugins
from pelton.builder.profiles import Bucket
from pelton.builder.signature import Signature
from pelton.builder.timing_cache import Entry
from pelton.errors import ConfigError
from pelton.kernels.tactic import NodeSpec, Tactic, TensorSpec

ROWS = "rows"
#: Times that differ by less are equal: such differences are noise.
TIE = 0.03

SignatureOf = Callable[[Call, NodeSpec, Bucket], Signature]
#: (max_tokens, tactic), ascending: the tactic of steps of at most so many tokens.
Table = tuple[tuple[int, Tactic], ...]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What was considered for a call in one bucket, for the report."""

    bucket: Bucket
    signature: Signature
    tactic: Tactic | None
    reason: str
    """default, timed or user."""
    times: Mapping[str, float]
    """Microseconds by tactic, as far as known."""
    rejected: Mapping[str, str]
    """Tactics that support the call and could not be taken -> why."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The outcome."""

    tables: tuple[Table, ...]
    """Of each call; empty: only the reference runs it."""
    decisions: tuple[tuple[Decision, ...], ...]
    """Of each call, by bucket."""
    specs: tuple[NodeSpec, ...]
    layouts: Mapping[Root, str]
    candidates: int
    """Different (signature, tactic) pairs that were considered."""
    notes: tuple[str, ...]


def choose(
    calls: Sequence[Call],
    quants: Mapping[Root, str],
    tactics: Mapping[str, Tactic],
    activations: str,
    *,
    buckets: Sequence[Bucket],
    signature_of: SignatureOf,
    measure: Measurements,
    plugins: PluginConfig | None = None,
    known: Mapping[str, Tactic] | None = None,
) -> Choice:
    """``quants``: stored value type of each weight and constant. ``tactics``: those the target can run,
    of the ``known`` ones. Raises ``ConfigError`` for a user's choice that cannot be kept."""
    specs = tuple(node_spec(call, quants, activations) for call in calls)
    candidates = [supporting(spec, tactics) for spec in specs]
    plugged = apply_plugins(plugins or {}, specs, candidates, known or tactics, tactics.keys())
    signatures = [
        [signature_of(call, spec, bucket) for bucket in buckets]
        for call, spec in zip(calls, specs, strict=True)
    ]
    return _Chooser(calls, quants, specs, plugged, buckets, signatures, measure).run()


def supporting(spec: NodeSpec, tactics: Mapping[str, Tactic]) -> list[Tactic]:
    """The tactics that can run such a call, best first."""
    found = (t for t in tactics.values() if t.op == spec.op and t.supports(spec))
    return sorted(found, key=lambda t: t.order)


class _Chooser:
    def __init__(
        self,
        calls: Sequence[Call],
        quants: Mapping[Root, str],
        specs: tuple[NodeSpec, ...],
        plugged: Plugged,
        buckets: Sequence[Bucket],
        signatures: Sequence[Sequence[Signature]],
        measure: Measurements,
    ) -> None:
        self._calls, self._quants, self._specs = calls, quants, specs
        self._options, self._plugged = plugged.options, plugged
        self._buckets, self._signatures, self._measure = buckets, signatures, measure
        self._rejected: list[dict[str, str]] = [{} for _ in calls]

    def run(self) -> Choice:
        considered = {
            (signature.key, tactic.name)
            for signatures, options in zip(self._signatures, self._options, strict=True)
            for signature in signatures
            for tactic in options
        }
        self._prune()
        times = [self._times(i) for i in range(len(self._calls))]
        self._drop_wrong(times)
        layouts = self._choose_layouts(times)
        decisions = tuple(self._decide(i, times[i], layouts) for i in range(len(self._calls)))
        return Choice(
            tables=tuple(map(_table, decisions)),
            decisions=decisions,
            specs=self._specs,
            layouts=layouts,
            candidates=len(considered),
            notes=(*self._plugged.notes, *self._measure.notes()),
        )

    # ---- Layouts that all users of a weight can have ----

    def _users(self) -> dict[Root, list[tuple[int, int]]]:
        """(call, operand) pairs of each weight, of calls that have tactics."""
        users: dict[Root, list[tuple[int, int]]] = {root: [] for root in self._quants}
        for i, call in enumerate(self._calls):
            for operand, value in enumerate(call.inputs):
                if value is not None and value.root in users and self._options[i]:
                    users[value.root].append((i, operand))
        return users

    def _prune(self) -> None:
        """Drop candidates whose layout another user of the weight has no tactic for, until none is left."""
        changed = True
        while changed:
            changed = False
            for root, users in self._users().items():
                common = self._common(users)
                for i, operand in users:
                    kept = [t for t in self._options[i] if _layout(t, operand) in common]
                    if len(kept) < len(self._options[i]):
                        self._reject(i, operand, root, users)
                        self._options[i] = kept
                        changed = True

    def _common(self, users: Sequence[tuple[int, int]]) -> set[str]:
        sets = [{_layout(t, operand) for t in self._options[i]} for i, operand in users]
        return set.intersection(*sets) if sets else set()

    def _reject(self, i: int, operand: int, root: Root, users: Sequence[tuple[int, int]]) -> None:
        common = self._common(users)
        ops = sorted({self._calls[j].op.name for j, _ in users if j != i} - {self._calls[i].op.name})
        for tactic in self._options[i]:
            if _layout(tactic, operand) not in common:
                self._rejected[i][tactic.name] = (
                    f"wants {root.name} as {_layout(tactic, operand)}, for which "
                    f"{' and '.join(ops) or 'another call'} of the same weight has no tactic"
                )
        if i in self._plugged.chosen:
            (tactic,) = self._options[i]
            if tactic.name in self._rejected[i]:
                op = self._calls[i].op.name
                raise ConfigError(
                    f"plugin {op}={tactic.name} cannot be kept: it {self._rejected[i][tactic.name]}"
                )

    # ---- Times ----

    def _times(self, i: int) -> list[Entry | None]:
        """By bucket; nothing is measured where there is nothing to choose."""
        if len(self._options[i]) < 2:
            return [None] * len(self._buckets)
        return [self._measure.times(s, self._options[i]) for s in self._signatures[i]]

    def _drop_wrong(self, times: Sequence[Sequence[Entry | None]]) -> None:
        """A tactic that is wrong in one bucket of a call is used in none."""
        for i, entries in enumerate(times):
            wrong = {name for entry in entries if entry for name, us in entry.items() if us is None}
            self._options[i] = [t for t in self._options[i] if t.name not in wrong]
            self._rejected[i].update(dict.fromkeys(wrong, "computes wrongly"))
        self._prune()

    def _choose_layouts(self, times: Sequence[Sequence[Entry | None]]) -> dict[Root, str]:
        layouts = {}
        for root, users in self._users().items():
            common = sorted(self._common(users), key=lambda layout: (-self._priority(users, layout), layout))
            costs = {layout: self._cost(users, layout, common, times) for layout in common}
            if not common:
                # No tactic for any user, or none in common: the references read rows.
                layouts[root] = ROWS
            elif any(cost is None for cost in costs.values()):
                layouts[root] = common[0]
            else:
                best = min(c for c in costs.values() if c is not None)
                layouts[root] = next(k for k in common if (costs[k] or 0) <= best * (1 + TIE))
        return layouts

    def _priority(self, users: Sequence[tuple[int, int]], layout: str) -> int:
        return sum(
            max(t.priority for t in self._options[i] if _layout(t, operand) == layout) for i, operand in users
        )

    def _cost(
        self,
        users: Sequence[tuple[int, int]],
        layout: str,
        among: Sequence[str],
        times: Sequence[Sequence[Entry | None]],
    ) -> float | None:
        """Mean over buckets of the users' time relative to the best layout; None: not all is known."""
        total = 0.0
        for b in range(len(self._buckets)):
            sums = {k: self._bucket_time(users, k, b, times) for k in among}
            known = [s for s in sums.values() if s is not None]
            mine = sums[layout]
            if mine is None or len(known) < len(sums):
                return None
            total += mine / max(min(known), 1e-9)
        return total / len(self._buckets)

    def _bucket_time(
        self,
        users: Sequence[tuple[int, int]],
        layout: str,
        bucket: int,
        times: Sequence[Sequence[Entry | None]],
    ) -> float | None:
        total = 0.0
        for i, operand in users:
            entry = times[i][bucket]
            if entry is None:
                return None
            of_layout = [entry[t.name] for t in self._options[i] if _layout(t, operand) == layout]
            total += min((us for us in of_layout if us is not None), default=0.0)
        return total

    # ---- The tactic of each bucket ----

    def _decide(
        self, i: int, times: Sequence[Entry | None], layouts: Mapping[Root, str]
    ) -> tuple[Decision, ...]:
        call = self._calls[i]
        fitting = [t for t in self._options[i] if _fits(call, t, layouts)]
        rejected = dict(self._rejected[i])
        for option in self._options[i]:
            if option not in fitting:
                rejected[option.name] = "another layout of the weight was chosen for all buckets"
        decisions = []
        for bucket, signature, entry in zip(self._buckets, self._signatures[i], times, strict=True):
            known = {name: us for name, us in (entry or {}).items() if us is not None}
            tactic, timed = _fastest([t for t in fitting if t.fits(bucket.max_tokens)], known)
            reason = "user" if i in self._plugged.chosen else "timed" if timed else "default"
            decisions.append(
                Decision(
                    bucket=bucket,
                    signature=signature,
                    tactic=tactic,
                    reason=reason,
                    times=known,
                    rejected=rejected,
                )
            )
        return tuple(decisions)


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


def _fastest(fitting: Sequence[Tactic], times: Mapping[str, float]) -> tuple[Tactic | None, bool]:
    """The tactic to take of ``fitting`` (highest priority first), and whether times decided."""
    if not fitting:
        return None, False
    if len(fitting) == 1 or any(t.name not in times for t in fitting):
        return fitting[0], len(fitting) == 1 and bool(times)
    best = min(times[t.name] for t in fitting)
    return next(t for t in fitting if times[t.name] <= best * (1 + TIE)), True


def _table(decisions: Sequence[Decision]) -> Table:
    """One row per tactic: neighbouring buckets of one tactic become one."""
    rows: list[tuple[int, Tactic]] = []
    for decision in decisions:
        if decision.tactic is None:
            return ()
        if rows and rows[-1][1] is decision.tactic:
            rows.pop()
        rows.append((decision.bucket.max_tokens, decision.tactic))
    return tuple(rows)


def _layout(tactic: Tactic, operand: int) -> str:
    return tactic.weight_layouts.get(operand, ROWS)


def _fits(call: Call, tactic: Tactic, layouts: Mapping[Root, str]) -> bool:
    return all(
        _layout(tactic, index) == layouts[value.root]
        for index, value in enumerate(call.inputs)
        if value is not None and value.root in layouts
    )
