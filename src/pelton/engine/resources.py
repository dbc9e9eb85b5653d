"""What this machine lets the process use: memory and cores, container limits included."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """CPU cores this process may run on (affinity respected)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory() -> int:
    """Bytes that can be allocated without swapping: the system's estimate or the cgroup's rest,
    whichever is smaller."""
    free = _system_available()
    limit = _cgroup_rest()
    return free if limit is None else min(free, limit)


def _system_available() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_rest() -> int | None:
    for limit, used, stat, cache in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        try:
            ceiling = (_CGROUP / limit).read_text().strip()
            current = int((_CGROUP / used).read_text())
            counts = dict(line.split() for line in (_CGROUP / stat).read_text().splitlines())
        except (OSError, ValueError):
            continue
        if ceiling.isdigit() and int(ceiling) < 1 << 60:
            # Files that were read (a checkpoint, say) count as used until somebody needs the memory.
            return max(0, int(ceiling) - current + int(counts.get(cache, 0)))
    return None


def human_bytes(n: float) -> str:
    """``n`` bytes for people, decimal units: "9.1 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n) < 999.5:
            return f"{n:.0f} {unit}" if unit in ("B", "kB") or n >= 99.95 else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"
