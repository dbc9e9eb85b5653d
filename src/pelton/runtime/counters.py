"""What an executor counts, and the snapshot that front ends get of it."""

from __future__ import annotations

import time

from pelton.engine.batch import ModelSession
from pelton.engine.memory_monitor import MemoryUse
from pelton.runtime.host_time import HostClock, HostTime
from pelton.runtime.kv_cache import KVCacheManager
from pelton.runtime.scheduler import Scheduler
from pelton.runtime.stats import ExecutorStats, KVGroupStats

#: Seconds for which what costs more than all other counters together is kept.
_KEPT = 1.0


class Counters:
    """Since the executor began; its thread counts, another may take snapshots."""

    def __init__(self) -> None:
        self.steps = 0
        self.prompt_tokens = self.prefix_hit_tokens = 0
        self.computed_tokens = self.generated_tokens = 0
        self.finished: dict[str, int] = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self._last_progress = time.monotonic()
        self._dear_due = 0.0
        self._memory_use: MemoryUse | None = None
        self._host_time: HostTime | None = None

    def progress(self) -> None:
        """Something was done just now, or there is nothing to do."""
        self._last_progress = time.monotonic()

    @property
    def idle_seconds(self) -> float:
        """Since the last progress."""
        return time.monotonic() - self._last_progress

    def forget_host_time(self) -> None:
        """The clock is another one."""
        self._host_time = None

    def snapshot(
        self,
        session: ModelSession,
        scheduler: Scheduler,
        kv: KVCacheManager,
        clock: HostClock,
        *,
        stuck: bool,
    ) -> ExecutorStats:
        """Cheap."""
        now = time.monotonic()
        if now >= self._dear_due:
            self._dear_due = now + _KEPT
            self._memory_use = getattr(session, "memory", None)
            self._host_time = None
        if self._host_time is None:
            self._host_time = clock.last
        return ExecutorStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_groups=tuple(
                KVGroupStats(
                    window=window,
                    used_blocks=pool.num_used,
                    cached_blocks=pool.num_cached,
                    total_blocks=pool.num_blocks,
                )
                for window, pool in zip(kv.windows, kv.pools, strict=True)
            ),
            steps=self.steps,
            prompt_tokens=self.prompt_tokens,
            prefix_hit_tokens=self.prefix_hit_tokens,
            computed_tokens=self.computed_tokens,
            generated_tokens=self.generated_tokens,
            preemptions=scheduler.num_preemptions,
            memory=self._memory_use,
            host_time=self._host_time,
            weight_epoch=int(getattr(session, "weight_epoch", 0)),
            finished=dict(self.finished),
            last_progress_time=self._last_progress,
            stuck=stuck,
        )
