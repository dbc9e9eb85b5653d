"""Folders that become something whole, or nothing: beside it, and gone when their process is."""

from __future__ import annotations

import glob
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def folder_beside(output: Path, doing: str) -> Iterator[Path]:
    """A new folder beside ``output``, removed with the block. Raises ``OSError``.

    ``doing`` is part of its name. A killed process leaves its folder; the next that does the same for the
    same ``output`` removes it.
    """
    output = output.absolute()
    start = f".{output.name}.{doing}-"
    for stale in output.parent.glob(f"{glob.escape(start)}*"):
        pid = stale.name.removeprefix(start).partition("-")[0]
        if not (pid.isdigit() and alive(int(pid))):
            shutil.rmtree(stale, ignore_errors=True)
    folder = output.parent / f"{start}{os.getpid()}-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def alive(pid: int) -> bool:
    """Whether a process of that id runs."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
