"""The counter of host time per step: what the executor's thread computes between device steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

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


class HostClock:
    """Times steps. On a CPU the session's own run counts as the device's."""

    def __init__(self) -> None:
        self._seconds = np.zeros(_KEPT)
        self._count = 0
        self._waited = 0.0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around one step's work."""
        start, self._waited = time.perf_counter(), 0.0
        yield
        self._seconds[self._count % _KEPT] = time.perf_counter() - start - self._waited
        self._count += 1

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what waits for the device."""
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    @property
    def last(self) -> HostTime | None:
        """None before the first step."""
        if not self._count:
            return None
        median, p99 = np.percentile(self._seconds[: min(self._count, _KEPT)], [50, 99]).tolist()
        return HostTime(median=median, p99=p99)
