"""Peak anonymous memory of this process while something runs."""

from __future__ import annotations

import threading
from pathlib import Path

_STATUS = Path("/proc/self/status")
_INTERVAL = 0.02


def anonymous_bytes() -> int:
    """Anonymous resident memory now, bytes: mapped files not counted; 0 where it is unknown."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


class PeakMemory:
    """Samples ``anonymous_bytes`` in a thread between enter and exit; ``peak`` is the largest."""

    def __init__(self) -> None:
        self.peak = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak-memory", daemon=True)

    def _sample(self) -> None:
        while not self._stop.wait(_INTERVAL):
            self.peak = max(self.peak, anonymous_bytes())

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, anonymous_bytes())
