"""Finds NVIDIA's libraries: of Python packages that carry them, or of the system."""

from __future__ import annotations

import ctypes as C
import importlib.util
from collections.abc import Sequence
from pathlib import Path


def find(names: Sequence[str], package: str) -> C.CDLL | None:
    """The first of ``names`` that loads; ``package``: the folder below ``nvidia`` that CUDA 12 has it in."""
    folders = []
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        folders += [Path(root) / "cu13" / "lib", Path(root) / package / "lib"]
    for path in (*(str(f / n) for f in folders for n in names if (f / n).exists()), *names):
        try:
            return C.CDLL(path)
        except OSError:
            continue
    return None
