"""The part of a build that chooses tactics: target, timing cache, measuring, in one object.

Made before anything costs time, so that settings and files that cannot be used are refused at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pelton.builder.calls import Call, Program, Root
from pelton.builder.measure import Measurements
from pelton.builder.profiles import Bucket, buckets, step_limits
from pelton.builder.signature import CONTEXT, Signature, signature_of
from pelton.builder.tactics import Choice, choose
from pelton.builder.target import sm_of
from pelton.builder.timing import Timer
from pelton.builder.timing_cache import (
    Entry,
    TimedOn,
    TimingCache,
    open_timing_cache,
    this_machine,
    update_timing_cache,
)
from pelton.engine.config import BuildConfig
from pelton.engine.resources import cores
from pelton.errors import ConfigError
from pelton.kernels import native
from pelton.kernels.cpu_levels import ANY, runs
from pelton.kernels.layouts import LAYOUTS
from pelton.kernels.tactic import SMALL_STEPS, NodeSpec, Tactic, all_tactics


@dataclass(frozen=True, kw_only=True)
class Selected:
    """The outcome."""

    choice: Choice
    cpu_level: str
    """What a CPU must have to run the chosen kernels: a level, or ``any``."""
    timing_cache: TimingCache | None
    """The times that were used; None: none were."""
    timed: int
    """Tactics measured in this build."""
    cached: int
    """Tactics whose times were in the cache."""
    untimed: int = 0
    """Kinds of calls that have several tactics and no times, so that default orders decided."""


class Selector:
    """Chooses tactics for a resolved ``config``; ``path``: the timing cache to read and to update.

    ``may_measure=False`` uses the cache and default orders only. Raises ``ConfigError`` for a cache
    that does not hold for the target.
    """

    def __init__(self, config: BuildConfig, path: Path | None = None, *, may_measure: bool = True) -> None:
        assert config.cpu_level is not None
        self._config, self._path = config, path
        self._known = all_tactics()
        self.tactics = target_tactics(self._known, config.cpu_level)
        """Tactics that the target can run, by name."""
        self._measures = bool(config.timing) and may_measure
        self._origin: TimedOn | None = None
        self._entries: dict[str, Entry] = {}
        self._threads = config.threads or cores()
        if path is not None and not native.available():
            raise ConfigError(f"the timing cache {path} cannot be used: the native library is not installed")
        if native.available():
            self._origin = this_machine()
        if path is not None and self._origin is not None:
            self._open(path, self._origin)

    def _open(self, path: Path, here: TimedOn) -> None:
        level = self._config.cpu_level
        if level in (ANY, here.cpu_level):
            self._entries = open_timing_cache(path, here).entries
            return
        # Built here for other machines: times come from one of those, shipped.
        if not path.exists():
            raise ConfigError(
                f"there is no timing cache {path}, and times for cpu_level {level} cannot be measured on "
                f"this {here.cpu_level} CPU; give a cache from a {level} CPU, or leave it out"
            )
        wanted = TimedOn(
            cpu="",
            cpu_level=str(level),
            cores=0,
            native_abi=here.native_abi,
            library=here.library,
            pelton=here.pelton,
        )
        cache = open_timing_cache(path, wanted, besides=("cpu", "cores"))
        self._origin, self._entries = cache.timed_on, cache.entries
        self._threads = self._config.threads or cache.timed_on.cores

    def choose(self, program: Program, quants: Mapping[Root, str]) -> Selected:
        """Tactics for ``program``; ``quants``: stored value type of each weight and constant.

        What was measured is added to the timing cache's file at once. Raises ``ConfigError``.
        """
        config = self._config
        assert config.activations is not None
        assert config.max_seq_len is not None
        measure = Measurements(self._timer(), self._entries)
        stored = sum(LAYOUTS["rows"].nbytes(q, _static(root)) for root, q in quants.items())

        def signature(call: Call, spec: NodeSpec, bucket: Bucket) -> Signature:
            context = min(CONTEXT, config.max_seq_len or CONTEXT)
            return signature_of(
                call, spec, bucket, context=context, threads=self._threads, reuse_bytes=stored
            )

        choice = choose(
            program.calls,
            quants,
            self.tactics,
            config.activations,
            buckets=buckets(config),
            signature_of=signature,
            measure=measure,
            plugins=config.plugins,
            known=self._known,
        )
        used = None
        if self._origin is not None and measure.used:
            used = TimingCache(timed_on=self._origin, entries=measure.used)
            if self._path is not None and measure.timed:
                update_timing_cache(self._path, used)
        return Selected(
            choice=choice,
            cpu_level=needed_level(choice, str(config.cpu_level)),
            timing_cache=used,
            timed=measure.timed,
            cached=measure.cached,
            untimed=len(measure.unknown),
        )

    def _timer(self) -> Timer | None:
        if not self._measures:
            return None
        from pelton.builder.timing import NativeTimer

        return NativeTimer(self._threads)


def target_tactics(known: Mapping[str, Tactic], cpu_level: str) -> dict[str, Tactic]:
    """Those of ``known`` that every CPU of ``cpu_level`` can run; all where there is no library to ask."""
    known = {name: t for name, t in known.items() if t.device == "cpu"}
    if not native.available():
        return known
    kernels = native.library_kernels()
    outside = {name: t for name, t in known.items() if t.kind != "native" and t.device == "cpu"}
    return outside | {name: known[name] for name in known.keys() & kernels if runs(kernels[name], cpu_level)}


def runs_on_this_cpu(cpu_level: str) -> bool:
    """Whether an engine that needs ``cpu_level`` runs here (on the reference where there is no library)."""
    return cpu_level == ANY or not native.available() or native.has_level(cpu_level)


def needed_level(choice: Choice, cpu_level: str) -> str:
    """``any`` where every chosen kernel has a baseline version, else the level built for. C code from
    outside is compiled for that level."""
    if not native.available():
        return ANY
    kernels = native.library_kernels()
    chosen = {tactic.name: tactic.kind for table in choice.tables for _, tactic in table}
    anywhere = all(
        runs(kernels[name], ANY) if kind == "native" else kind == "python" for name, kind in chosen.items()
    )
    return ANY if anywhere else cpu_level


def _static(root: Root) -> tuple[int, ...]:
    return tuple(d for d in root.shape if isinstance(d, int))


class CudaSelector:
    """Chooses tactics of GPU targets by their default order, in buckets where that order changes.

    Raises ``ConfigError`` when a timing cache is given.
    """

    def __init__(self, config: BuildConfig, path: Path | None) -> None:
        if path is not None:
            raise ConfigError(
                f"timing caches are for CPU engines, and target is {config.target}; leave {path} out"
            )
        self._config = config
        self._known = all_tactics()
        assert config.target is not None
        sm = sm_of(config.target)
        self.tactics = {
            name: t
            for name, t in self._known.items()
            if t.device == "cuda"
            and t.sm in (0, sm)
            and (t.batch_invariant or not config.deterministic)
            and t.sums in ("float32", config.accumulate)
        }
        """Tactics that the target can run, by name."""

    def choose(self, program: Program, quants: Mapping[Root, str]) -> Selected:
        """Tactics for ``program``; ``quants``: stored value type of each weight and constant."""
        config = self._config
        assert config.activations is not None
        tokens, batch = step_limits(config)["T"], step_limits(config)["B"]
        ends = {n for t in self.tactics.values() for n in (t.largest_tokens, t.above)} | {tokens}
        found = [
            Bucket(max_tokens=end, dims={"T": end, "B": min(end, batch), "N": end})
            for end in sorted(ends)
            if 0 < end <= tokens
        ]

        def signature(call: Call, spec: NodeSpec, bucket: Bucket) -> Signature:
            return signature_of(call, spec, bucket, context=CONTEXT, threads=0, reuse_bytes=0)

        choice = choose(
            program.calls,
            quants,
            self.tactics,
            config.activations,
            buckets=found,
            signature_of=signature,
            measure=Measurements(None),
            plugins=config.plugins,
            known=self._known,
        )
        if config.accumulate == "float16":
            choice = replace(choice, notes=(*choice.notes, self._sums(program, choice)))
        return Selected(choice=choice, cpu_level=ANY, timing_cache=None, timed=0, cached=0)

    def _sums(self, program: Program, choice: Choice) -> str:
        """What adds in float16, and what of the same ops does not."""
        able = {t.op for t in self.tactics.values() if t.sums == "float16"}
        rest: dict[str, int] = {}
        done = 0
        for call, table in zip(program.calls, choice.tables, strict=True):
            if table and table[-1][1].sums == "float16":
                done += 1
            elif call.op.name in able:
                rest[call.op.name] = rest.get(call.op.name, 0) + 1
        others = ", ".join(f"{n} {op}" for op, n in sorted(rest.items()))
        return f"in steps of more than {SMALL_STEPS} tokens {done} products and attentions add in float16" + (
            f"; others add in float32: {others}" if others else ""
        )
