"""The counter of host time per step: what the executor's thread computes between device steps."""

from __future__ import annotations

import time

import msgspec
import numpy as np

#: Steps that the percentiles are of.
_KEPT = 1024


class HostTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step on the host, waiting for the device left out: of the last 1024 steps.

    A GPU's step that is launched kernel by kernel (one with a prompt's chunk) may wait for room in the
    driver's queue, and that counts too.
    """

    median: float
    p99: float


class _Step:
    """Context manager: a step."""

    __slots__ = ("_clock", "_start")

    def __init__(self, clock: HostClock) -> None:
        self._clock = clock

    def __enter__(self) -> None:
        self._clock.waited = 0.0
        self._start = time.perf_counter()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:
            self._clock.count(time.perf_counter() - self._start)


class _Waiting:
    """Context manager: a wait within a step."""

    __slots__ = ("_clock", "_start")

    def __init__(self, clock: HostClock) -> None:
        self._clock = clock

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:
            self._clock.waited += time.perf_counter() - self._start


class HostClock:
    """Times steps. On a CPU the session's own run counts as the device's."""

    def __init__(self) -> None:
        self._seconds = np.zeros(_KEPT)
        self._count = 0
        self.waited = 0.0
        """Of the step that is timed."""

    def step(self) -> _Step:
        """Around one step's work."""
        return _Step(self)

    def waiting(self) -> _Waiting:
        """Around what waits for the device."""
        return _Waiting(self)

    def count(self, seconds: float) -> None:
        """A step took so long, its waiting included."""
        self._seconds[self._count % _KEPT] = seconds - self.waited
        self._count += 1

    @property
    def last(self) -> HostTime | None:
        """None before the first step."""
        if not self._count:
            return None
        median, p99 = np.percentile(self._seconds[: min(self._count, _KEPT)], [50, 99]).tolist()
        return HostTime(median=median, p99=p99)
