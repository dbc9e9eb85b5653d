"""Writing an engine directory so that it is either whole or not there."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pelton.engine.artifact import is_engine
from pelton.engine.resources import human_bytes
from pelton.engine.temporary import folder_beside
from pelton.errors import ConfigError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def check_output(output: Path) -> bool:
    """True when ``output`` is an engine that the build will replace.

    Raises ``ConfigError`` when it is something else, or cannot be written.
    """
    parent = output.absolute().parent
    if not parent.is_dir():
        raise ConfigError(f"cannot write {output}: there is no directory {parent}; make it first")
    inside = next((p for p in output.absolute().parents if is_engine(p)), None)
    if inside is not None:
        raise ConfigError(f"cannot write {output}: it lies inside the engine {inside}; choose another output")
    if not os.access(parent, os.W_OK):
        raise ConfigError(f"cannot write {output}: {parent} is not writable; choose another output")
    if not output.exists() and not output.is_symlink():
        return False
    if output.is_dir() and (is_engine(output) or not any(output.iterdir())):
        return is_engine(output)
    raise ConfigError(f"{output} exists and is not an engine; remove it or choose another output")


def check_space(folder: Path, nbytes: int) -> None:
    """Raise ``ConfigError`` when ``nbytes`` of weights do not fit onto the disk of ``folder``."""
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise ConfigError(
            f"the engine needs {human_bytes(nbytes)} in {folder.parent}, where {human_bytes(free)} are free; "
            "free some or choose another output"
        )


@contextmanager
def engine_directory(output: Path) -> Iterator[Path]:
    """A temporary directory beside ``output``, renamed to it when the block ends without an error.

    The rename replaces an older engine in one step (where the file system can exchange names).
    Killed builds leave only the temporary directory; the next build to the same place removes it.
    Raises ``ConfigError`` when the disk is full.
    """
    output = output.absolute()
    try:
        with folder_beside(output, "building") as temporary:
            yield temporary
            _replace(temporary, output)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigError(
            f"the disk of {output.parent} is full, so the engine is not built; "
            "free some or choose another output"
        ) from error


def _replace(new: Path, output: Path) -> None:
    """Put ``new`` at ``output``; what was there takes the name of ``new``."""
    if output.is_dir() and not _exchange(new, output):
        aside = new.with_name(new.name + "-old")
        output.rename(aside)
        new.rename(output)
        shutil.rmtree(aside, ignore_errors=True)
    elif new.exists() and not output.exists():
        new.rename(output)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names atomically (Linux ``renameat2``); False where that is not possible."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    code: int = renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE)
    return code == 0
