"""Where a build's time goes, and telling the user how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: ``progress(stage, done, total)``: a stage begins with done = 0; total is 0 where it is not known.
Progress = Callable[[str, int, int], None]


class Clock:
    """Wall time by stage. Stages may nest; the inner one's time is not counted twice."""

    def __init__(self, progress: Progress) -> None:
        self.seconds: dict[str, float] = {}
        self.progress = progress
        self._inner = 0.0

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self.progress(stage, 0, 0)
        outer, self._inner = self._inner, 0.0
        started = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - started
            self.seconds[stage] = self.seconds.get(stage, 0.0) + took - self._inner
            self._inner = outer + took
