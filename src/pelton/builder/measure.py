"""Times of tactics from the timing cache or, where it has none, from this machine.

One object per build. It remembers what it was asked (the engine keeps these entries), counts, and
stops measuring when its time is up: what is then still unknown is chosen by priority, and said.
"""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Callable, Mapping, Sequence

from pelton.builder.signature import Signature
from pelton.builder.timing import Timer
from pelton.builder.timing_cache import Entry
from pelton.kernels.tactic import Tactic

#: Seconds that a build may spend on measuring.
BUDGET = 25.0


def label(tactic: Tactic) -> str:
    """What the timing cache calls a tactic: its name; with a hash of its source where that is not the
    native library's, which the cache's origin names already."""
    if tactic.kind == "native":
        return tactic.name
    source = tactic.source
    if not source:
        assert tactic.implementation is not None
        source = inspect.getsource(inspect.unwrap(tactic.implementation))
    return f"{tactic.name}#{hashlib.sha256(source.encode()).hexdigest()[:12]}"


class Measurements:
    """``timer``: None measures nothing; ``known``: the cache's entries by signature."""

    def __init__(
        self,
        timer: Timer | None,
        known: Mapping[str, Entry] | None = None,
        *,
        budget: float = BUDGET,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timer = timer
        self._known = dict(known or {})
        self._budget = budget
        self._clock = clock
        self._spent = 0.0
        self.used: dict[str, Entry] = {}
        """What was asked and is known, by signature."""
        self.timed = 0
        """Tactics measured here."""
        self.cached = 0
        """Tactics whose time the cache had."""
        self.unknown: set[str] = set()
        """Signatures without times."""
        self.wrong: dict[tuple[str, str], str] = {}
        """(tactic, op) -> how its results depart from the reference."""

    def times(self, signature: Signature, tactics: Sequence[Tactic]) -> Entry | None:
        """Microseconds by tactic (None for one that computes wrongly), or None: not known."""
        labels = {t.name: label(t) for t in tactics}
        entry = self._remembered(signature, sorted(labels.values()))
        if entry is None:
            if self._timer is None or self._spent > self._budget:
                self.unknown.add(signature.key)
                return None
            start = self._clock()
            entry = self.used[signature.key] = self._measure(self._timer, signature, tactics)
            self._spent += self._clock() - start
            self.timed += len(labels)
        return {name: entry[known] for name, known in labels.items()}

    def _remembered(self, signature: Signature, labels: Sequence[str]) -> Entry | None:
        """What this build or the cache knows of a call, if it knows all of it."""
        for entries in (self.used, self._known):
            entry = entries.get(signature.key)
            if entry is None or any(known not in entry for known in labels):
                continue
            if entries is self._known:
                self._note_wrong(signature, entry, "as the timing cache says")
                self.cached += len(labels)
                self.used[signature.key] = {known: entry[known] for known in labels}
            return entry
        return None

    def _measure(self, timer: Timer, signature: Signature, tactics: Sequence[Tactic]) -> Entry:
        right, entry = [], Entry()
        for tactic in tactics:
            why = timer.check(signature, tactic)
            if why is None:
                right.append(tactic)
            else:
                entry[label(tactic)] = None
                self._note_wrong(signature, {tactic.name: None}, why)
        times = timer.time(signature, right) if right else {}
        return entry | {label(t): times[t.name] for t in right}

    def _note_wrong(self, signature: Signature, entry: Entry, why: str) -> None:
        for name, microseconds in entry.items():
            if microseconds is None:
                self.wrong.setdefault((name, signature.op), why)

    def notes(self) -> list[str]:
        """What the user must know."""
        notes = [
            f"{name} computes {op} wrongly and is not used: {why}" for (name, op), why in self.wrong.items()
        ]
        if self._timer is not None and self.unknown:
            notes.append(
                f"{len(self.unknown)} calls were not timed within {self._budget:.0f} s and take their "
                "default tactic; build again with the same timing cache to time the rest"
            )
        return notes
