"""The memory a session declared beside the memory it uses.

Declared, before anything is loaded: weights (mapped files: page cache that all sessions of the engine
share, not anonymous memory), arena and workspace (``MemoryPlan``), the KV cache, and an overhead for
everything else. Measured: what the process has got since the session began.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from pelton.engine.config import EngineConfig
from pelton.engine.kv_cache import block_bytes

_STATUS = Path("/proc/self/status")

#: Scratch of one thread (``PELTON_SCRATCH_BYTES`` of csrc/pelton.h) and its stack as far as it is used.
THREAD_BYTES = (1 << 20) + (1 << 17)
#: Tables of the plan and Python objects.
OVERHEAD_BYTES = 24 << 20


class DeclaredMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a session takes, known before it is made: see ``declare``."""

    weights: int
    """Mapped files."""
    arena: int
    workspace: int
    inputs: int
    """A step's arrays."""
    kv: int
    overhead: int
    """Threads' scratch, tables of the plan, Python objects."""

    @property
    def declared(self) -> int:
        """Anonymous memory that the session may take: everything but weights."""
        return self.arena + self.workspace + self.inputs + self.kv + self.overhead


class MemoryUse(DeclaredMemory, frozen=True, kw_only=True):
    """Declared, and measured beside it (0: unknown)."""

    anonymous: int
    """Anonymous memory now, the process's."""
    growth: int
    """Of which since the session was begun."""
    peak_resident: int
    """Most resident memory of the process ever, mapped files included."""


def declare(config: EngineConfig, num_blocks: tuple[int, ...], threads: int) -> DeclaredMemory:
    """What a session of an engine for CPUs takes, with so many KV blocks in each group."""
    return DeclaredMemory(
        weights=config.memory.weights,
        arena=config.memory.arena,
        workspace=config.memory.workspace,
        inputs=config.memory.inputs,
        kv=kv_bytes(config, num_blocks),
        overhead=OVERHEAD_BYTES + threads * THREAD_BYTES,
    )


class MemoryMonitor:
    """Made before a session allocates anything."""

    def __init__(self) -> None:
        self._start = _status("RssAnon:")

    def use(self, config: EngineConfig, num_blocks: tuple[int, ...], threads: int) -> MemoryUse:
        """Declared and measured now."""
        anonymous = _status("RssAnon:")
        return MemoryUse(
            **msgspec.structs.asdict(declare(config, num_blocks, threads)),
            anonymous=anonymous,
            growth=max(0, anonymous - self._start),
            peak_resident=_status("VmHWM:"),
        )


def kv_bytes(config: EngineConfig, num_blocks: tuple[int, ...]) -> int:
    """Bytes of the KV cache with so many blocks in each group."""
    build = config.build
    assert build.block_size is not None and build.kv_dtype is not None
    groups = zip(config.model.kv_groups, num_blocks, strict=True)
    return sum(blocks * block_bytes(group, build.block_size, build.kv_dtype) for group, blocks in groups)


def _status(field: str) -> int:
    """A line of /proc/self/status in bytes; 0 where there is none."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
