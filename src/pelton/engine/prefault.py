"""Mapping weights ahead of their first use, in a thread beside the rest of start-up.

Weights are mapped, not read, so the first step meets a page fault every few pages: they cost it more
time than its arithmetic. The kernel can do the same in one call, which ctypes makes without the GIL.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pelton.engine.resources import available_memory

Bytes = npt.NDArray[np.uint8]

_MADV_POPULATE_READ = 22  # Linux 5.14; others refuse it, and pages are then mapped as they are used
_PIECE = 8 << 20
#: Share of the available memory up to which weights are mapped ahead: beyond it, reading the last of
#: them could push out the first.
_SHARE = 0.5


class Prefault:
    """Maps the pages of ``files`` (mapped arrays) in a thread, until done or closed."""

    def __init__(self, files: Sequence[Bytes]) -> None:
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if sum(f.nbytes for f in files) <= _SHARE * available_memory():
            # A daemon: leaving without ``close`` need not wait for it.
            self._thread = threading.Thread(
                target=self._run, args=(list(files),), name="pelton-prefault", daemon=True
            )
            self._thread.start()

    def _run(self, files: list[Bytes]) -> None:
        madvise = getattr(ctypes.CDLL(None), "madvise", None)
        if madvise is None:
            return
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for file in files:
            for start in range(0, file.nbytes, _PIECE):
                length = min(_PIECE, file.nbytes - start)
                if self._stop.is_set() or madvise(file.ctypes.data + start, length, _MADV_POPULATE_READ):
                    return

    def wait(self) -> None:
        """Return when everything is mapped."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Stop; idempotent. Returns when the thread has ended."""
        self._stop.set()
        self.wait()
