"""The user's cache folder: engines that were built on the way, and which engines are trusted."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def local_path(given: str | os.PathLike[str]) -> Path:
    """``given`` with ``~`` as the home folder; unlike ``Path.expanduser`` it takes any text."""
    return Path(os.path.expanduser(given))


def cache_dir() -> Path:
    """``$PELTON_CACHE``, else the platform's folder for caches; not created here."""
    if chosen := os.environ.get("PELTON_CACHE"):
        return local_path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "pelton"
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "pelton"
    return Path.home() / ".cache" / "pelton"
