"""Weights files are mapped, not read."""

from __future__ import annotations

import mmap
from pathlib import Path

from pelton.errors import CheckpointError


def map_file(path: Path) -> mmap.mmap | bytes:
    """The file's bytes, read-only; an empty file cannot be mapped. Raises ``CheckpointError``."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
