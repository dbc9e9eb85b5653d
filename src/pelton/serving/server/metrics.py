"""``/metrics``: the executor's counters as they are, and latencies as requests see them.

Each app has a registry of its own, so that two servers in one process do not mix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pelton.engine.memory_monitor import MemoryUse
from pelton.runtime.stats import ExecutorStats

if TYPE_CHECKING:
    from collections.abc import Callable

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class _ExecutorCollector(Collector):
    """Reads the counters at scrape time, so that nothing is kept twice."""

    def __init__(self, stats: Callable[[], ExecutorStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        gauges = {
            "pelton_requests_running": ("Requests in the current steps.", stats.running),
            "pelton_requests_waiting": ("Requests waiting for their first step.", stats.waiting),
            "pelton_weight_epoch": ("How often the weights have been replaced.", stats.weight_epoch),
            "pelton_kv_usage_ratio": ("Part of the KV cache's blocks in use.", stats.kv_usage),
        }
        counters = {
            "pelton_prompt_tokens": ("Prompt tokens of admitted requests.", stats.prompt_tokens),
            "pelton_generated_tokens": ("Tokens generated.", stats.generated_tokens),
            "pelton_prefix_cache_hit_tokens": ("Prompt tokens found cached.", stats.prefix_hit_tokens),
            "pelton_computed_tokens": ("Tokens computed, again ones too.", stats.computed_tokens),
            "pelton_preemptions": ("Requests set back to free KV blocks.", stats.preemptions),
            "pelton_steps": ("Steps run.", stats.steps),
        }
        if stats.host_time is not None:
            host = GaugeMetricFamily(
                "pelton_host_step_seconds",
                "Host time of a step without waiting for the device, last 1024 steps.",
                labels=["quantile"],
            )
            host.add_metric(["0.5"], stats.host_time.median)
            host.add_metric(["0.99"], stats.host_time.p99)
            yield host
        if stats.memory is not None:
            yield from _memory(stats.memory)
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value=value)


def _memory(use: MemoryUse) -> Iterator[Metric]:
    declared = GaugeMetricFamily(
        "pelton_memory_declared_bytes", "Memory that the engine said it needs, by part.", labels=["part"]
    )
    for part in ("weights", "arena", "workspace", "inputs", "kv", "overhead"):
        declared.add_metric([part], getattr(use, part))
    yield declared
    yield GaugeMetricFamily(
        "pelton_memory_growth_bytes",
        "Anonymous memory taken since the engine was loaded; declared: all parts but weights.",
        value=use.growth,
    )
    yield GaugeMetricFamily("pelton_memory_anonymous_bytes", "Of its process.", value=use.anonymous)
    yield GaugeMetricFamily(
        "pelton_memory_peak_resident_bytes", "Most ever, mapped weights included.", value=use.peak_resident
    )


class ServerMetrics:
    """Observes requests (``serving.async_llm.Observer``) and renders everything."""

    def __init__(self, stats: Callable[[], ExecutorStats]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_ExecutorCollector(stats))
        self._first = Histogram(
            "pelton_time_to_first_token_seconds",
            "From arrival to the first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._between = Histogram(
            "pelton_inter_token_seconds",
            "Between tokens of an answer.",
            buckets=_TOKEN_SECONDS,
            registry=self.registry,
        )
        self._queue = Histogram(
            "pelton_queue_seconds",
            "From arrival to the first step.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._whole = Histogram(
            "pelton_e2e_seconds", "From arrival to the end.", buckets=_SECONDS, registry=self.registry
        )
        self._finished = Counter(
            "pelton_requests_finished", "Answers ended, by reason.", ["reason"], registry=self.registry
        )

    def queued(self, seconds: float) -> None:
        """A request's first step began after ``seconds``."""
        self._queue.observe(seconds)

    def first_token(self, seconds: float) -> None:
        """A request's first token came after ``seconds``."""
        self._first.observe(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        """``count`` more tokens came ``seconds`` after the ones before."""
        for _ in range(count):
            self._between.observe(seconds / count)

    def finished(self, seconds: float, reason: str) -> None:
        """A request ended after ``seconds``."""
        self._whole.observe(seconds)
        self._finished.labels(reason=reason).inc()

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)
