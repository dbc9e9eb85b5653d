"""The timing cache: measured times of tactics by call signature, as a JSON file.

Times hold for the machine, the native library and the Pelton that measured them; a file of another
origin is refused with the reason. Times are never read from one and merged into another silently.
Torch-free: the command line reads it.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from pelton.engine.resources import cores
from pelton.errors import ConfigError
from pelton.kernels import native
from pelton.version import __version__

#: Microseconds of one call by tactic; None: the tactic computed wrongly and must not be used.
Entry = dict[str, Annotated[float, msgspec.Meta(gt=0)] | None]


class TimedOn(msgspec.Struct, frozen=True, kw_only=True):
    """Where times were measured."""

    cpu: str
    """Model name."""
    cpu_level: str
    """Instruction set in use, such as ``avx512``."""
    cores: int
    """Cores that the process could use (a call's threads are in its signature)."""
    native_abi: int
    library: str
    """Hash of the native library."""
    pelton: str
    """Pelton's version."""


class TimingCache(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file."""

    timed_on: TimedOn
    entries: dict[str, Entry] = {}
    """By ``Signature.key``."""


_WHAT = {
    "cpu": "CPU",
    "cpu_level": "CPU level",
    "cores": "number of cores",
    "native_abi": "native ABI",
    "library": "native library",
    "pelton": "Pelton",
}


def this_machine() -> TimedOn:
    """Raises ``MissingDependencyError`` without the native library."""
    native.load_library()
    return TimedOn(
        cpu=_cpu_model(),
        cpu_level=native.cpu_level(),
        cores=cores(),
        native_abi=native.ABI_VERSION,
        library=hashlib.sha256(native.LIBRARY_PATH.read_bytes()).hexdigest()[:16],
        pelton=__version__,
    )


def difference(found: TimedOn, wanted: TimedOn, besides: Sequence[str] = ()) -> str | None:
    """How two origins differ, in words; None: they do not (``besides`` these fields)."""
    parts = [
        f"{what} {getattr(found, field)} instead of {getattr(wanted, field)}"
        for field, what in _WHAT.items()
        if field not in besides and getattr(found, field) != getattr(wanted, field)
    ]
    return ", ".join(parts) or None


def read_timing_cache(path: Path) -> TimingCache:
    """The file at ``path``. Raises ``ConfigError`` when it cannot be read or is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=TimingCache)
    except OSError as error:
        raise ConfigError(f"the timing cache {path} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is no timing cache ({error}); give another file, or delete it to start anew"
        ) from error


def open_timing_cache(path: Path, here: TimedOn, *, besides: Sequence[str] = ()) -> TimingCache:
    """The file's times if they hold ``here``; an empty cache where there is no file.

    Raises ``ConfigError`` saying how the file's origin differs, when it does.
    """
    if not path.exists():
        if not path.parent.is_dir():  # said before minutes of measuring, not after
            raise ConfigError(f"there is no folder {path.parent} for the timing cache {path.name}")
        return TimingCache(timed_on=here)
    cache = read_timing_cache(path)
    if why := difference(cache.timed_on, here, besides):
        raise ConfigError(
            f"the timing cache {path} does not hold here: it was measured with {why}; give another file, "
            "delete it to measure anew, or build without it"
        )
    return cache


def merge(first: TimingCache, second: TimingCache) -> TimingCache:
    """All entries of both; where both have one, the first's stays whole (times of one entry were
    measured side by side, so they are not mixed). Raises ``ConfigError`` for different origins."""
    if why := difference(second.timed_on, first.timed_on):
        raise ConfigError(f"these timing caches do not belong together: the second was measured with {why}")
    return TimingCache(timed_on=first.timed_on, entries={**second.entries, **first.entries})


def encode(cache: TimingCache) -> bytes:
    """The file's bytes: equal caches give equal bytes."""
    entries = {key: dict(sorted(cache.entries[key].items())) for key in sorted(cache.entries)}
    ordered = msgspec.structs.replace(cache, entries=entries)
    return msgspec.json.format(msgspec.json.encode(ordered), indent=1) + b"\n"


def write_timing_cache(path: Path, cache: TimingCache) -> None:
    """Write the file in one step: readers see the old or the new one. Raises ``ConfigError``."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        temporary.write_bytes(encode(cache))
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"the timing cache {path} cannot be written: {error.strerror}") from error


def update_timing_cache(path: Path, cache: TimingCache) -> None:
    """Add ``cache``'s entries to the file; those that others wrote meanwhile stay."""
    if path.exists():
        found = read_timing_cache(path)
        if difference(found.timed_on, cache.timed_on) is None:
            cache = merge(cache, found)
            if encode(cache) == encode(found):
                return
    write_timing_cache(path, cache)


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    import platform

    return platform.processor() or platform.machine()
