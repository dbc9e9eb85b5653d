"""What an executor says of itself: gauges and counters, cheap to take and to send."""

from __future__ import annotations

import msgspec

from pelton.engine.memory_monitor import MemoryUse
from pelton.runtime.host_time import HostTime


class KVGroupStats(msgspec.Struct, frozen=True, kw_only=True):
    """One KV group's blocks: used by sequences, holding a findable prefix, and all."""

    window: int
    used_blocks: int
    cached_blocks: int
    total_blocks: int


class ExecutorStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges now and counters since the start."""

    running: int
    waiting: int
    kv_groups: tuple[KVGroupStats, ...]
    steps: int
    prompt_tokens: int
    """Prompt tokens of all requests admitted."""
    prefix_hit_tokens: int
    """Of those, found in the prefix cache."""
    computed_tokens: int
    """Tokens that went through the model, recomputed ones too."""
    generated_tokens: int
    preemptions: int
    weight_epoch: int = 0
    """How often the weights have been replaced."""
    memory: MemoryUse | None = None
    """The session's plan beside what its process uses, up to a second old; None: it does not say."""
    host_time: HostTime | None = None
    """Of a step, waiting for the device left out, up to a second old; None: no step yet."""
    finished: dict[str, int]
    """Requests ended, by finish reason."""
    last_progress_time: float
    """``time.monotonic()`` of the last step that computed something, or of the last idle moment."""
    stuck: bool
    """There is work, and no progress for ``watchdog_seconds``."""

    @property
    def kv_usage(self) -> float:
        """Share of blocks in use, of the fullest group: 0 to 1."""
        return max(group.used_blocks / group.total_blocks for group in self.kv_groups)
