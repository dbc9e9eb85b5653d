"""A session: an engine loaded on this machine. Batches in, logits out; no scheduler.

Nothing here may import torch: the native path serves without it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from pelton.engine import native_runner
from pelton.engine.artifact import Engine, open_engine
from pelton.engine.batch import InputBatch, StepResult
from pelton.engine.batch_sampling import PendingStep, SamplingInputs
from pelton.engine.config import EngineConfig
from pelton.engine.cuda.placement import gpu_device, gpu_free
from pelton.engine.kv_cache import KVCaches, allocate, resolve_num_blocks
from pelton.engine.memory_monitor import MemoryMonitor, MemoryUse
from pelton.engine.native_plan import NativePlan
from pelton.engine.plan import Instruction
from pelton.engine.prefault import Prefault
from pelton.engine.resources import cores
from pelton.engine.trust import check_trust, is_trusted
from pelton.engine.validate import BatchChecker
from pelton.errors import ConfigError, EngineError, MissingDependencyError, PeltonError
from pelton.kernels.gpu.taken import given_back_on_error

RunnerName = Literal["auto", "native", "reference"]


class Runner(Protocol):
    """Executes a plan over weights and caches that it was given."""

    def run(self, batch: InputBatch, outputs: Sequence[str]) -> StepResult: ...

    def close(self) -> None: ...


@runtime_checkable
class Reloadable(Protocol):
    """A runner that takes other weights in place, where a second copy would not fit."""

    def reload(self, engine: Engine) -> None: ...


class Submitting(Protocol):
    """A runner that samples on its device."""

    def submit(self, batch: InputBatch, sampling: SamplingInputs) -> PendingStep: ...


@runtime_checkable
class OnDevice(Protocol):
    """A runner on a device: what profilers and debuggers ask it for."""

    def profile(self, batch: InputBatch) -> list[tuple[Instruction, float]]: ...

    def read_caches(self) -> dict[tuple[str, int], npt.NDArray[np.generic]]: ...

    def zero_caches(self) -> None: ...


class Session:
    """An engine with its KV cache, ready to run steps (a ``ModelSession``).

    - ``threads``: CPU threads (default: as built; 0: all cores of the process);
    - ``kv_blocks``: blocks of each KV group, one number for all or one each (default: enough for
      ``max_batch_size`` sequences of ``max_seq_len`` tokens, or what fits in free memory);
    - ``trust``: run code that the engine carries although it was not built here (``engine.trust``);
    - ``runner``: ``native``, ``reference`` (PyTorch, slow: for debugging), or ``auto``: native
      where the library is there, else reference with a warning;
    - ``device``: which GPU, and ``gpu_memory_fraction``: how much of its free memory may be taken (as
      built), for an engine that was built for one.

    Raises ``EngineError`` when the engine cannot be used, ``ConfigError`` for a bad argument.
    """

    config: EngineConfig
    num_blocks: tuple[int, ...]

    def __init__(
        self,
        engine: str | Path | Engine,
        *,
        threads: int | None = None,
        kv_blocks: int | Sequence[int] | None = None,
        trust: bool = False,
        runner: RunnerName = "auto",
        device: int = 0,
        gpu_memory_fraction: float | None = None,
    ) -> None:
        self._monitor = MemoryMonitor()
        self.engine = engine if isinstance(engine, Engine) else open_engine(engine)
        self.engine.require_weights()
        check_trust(self.engine, trust)
        self.config = self.engine.config
        self.threads = _resolve_threads(self.config, threads)
        self._device = gpu_device(self.engine, device) if runner != "reference" else None
        if gpu_memory_fraction is None:
            gpu_memory_fraction = self.config.build.gpu_memory_fraction
        assert gpu_memory_fraction is not None
        free = None if self._device is None else gpu_free(self.engine, self._device, gpu_memory_fraction)
        self.num_blocks = resolve_num_blocks(self.config, kv_blocks, free)
        self._checker = BatchChecker(self.config, self.num_blocks, self.engine.plan.dims["N"])
        plan = self.engine.plan
        self._names = frozenset(o.name for o in plan.operands if plan.buffers[o.buffer].kind == "arena")
        # On a GPU the runner keeps the caches, where it computes.
        on_gpu = self._device is not None
        self._caches = KVCaches({}, {}, self.num_blocks) if on_gpu else allocate(self.config, self.num_blocks)
        self.weight_epoch = 0
        """How often the weights have been replaced: part of what cached prefixes are keyed by."""
        self._runner: Runner | None
        self.runner_name, self._runner = self._make_runner(runner, self.engine)
        self._prefault = Prefault([] if on_gpu else self.engine.weights.files)

    @property
    def engine_id(self) -> str:
        """Changes with any byte of the engine: what cached prefixes are keyed by."""
        return self.engine.engine_id

    @property
    def native_plan(self) -> NativePlan | None:
        """What runs the steps natively, for profilers; None on the reference runner."""
        return self._runner.plan if isinstance(self._runner, native_runner.NativeRunner) else None

    @property
    def kv_caches(self) -> KVCaches:
        """The caches, for debuggers: (blocks, kv_heads, block_size, head_dim) of each layer.

        Those of a device are a copy, as they are now.
        """
        if not isinstance(self._runner, OnDevice):
            return self._caches
        k, v = {}, {}
        for (kind, layer), array in self._runner.read_caches().items():
            (k if kind == "k_cache" else v)[layer] = array
        return KVCaches(k, v, self.num_blocks)

    def zero_kv_caches(self) -> None:
        """Make the KV caches zero, for debuggers."""
        if isinstance(self._runner, OnDevice):
            self._runner.zero_caches()
        for array in (*self._caches.k.values(), *self._caches.v.values()):
            array.fill(0)

    def profile_step(self, batch: InputBatch) -> list[float] | None:
        """Run a step and time it on its device: seconds of each instruction. None on a CPU."""
        if not isinstance(self._runner, OnDevice):
            return None
        self._checker.check(batch)
        return [milliseconds / 1e3 for _, milliseconds in self._runner.profile(batch)]

    @property
    def memory(self) -> MemoryUse | None:
        """What the session declares, and what its process has taken since it was made; None on a GPU."""
        if self._device is not None:
            return None
        return self._monitor.use(self.config, self.num_blocks, self.threads)

    def run(self, batch: InputBatch, outputs: Sequence[str] = ()) -> StepResult:
        """Compute one step and write its KV.

        ``outputs`` names intermediate tensors to return besides the logits: what the plan's instructions
        make, and the views of it that others read (``pelton debug ENGINE --list``).
        Raises ``ValueError`` when ``batch`` breaks the contract or a name is unknown; the KV cache
        is then untouched. The result's arrays are valid until the next run. Raises ``ConfigError`` for
        ``outputs`` of an engine whose tensors have no names (``profiling`` none).
        """
        if self._runner is None:
            raise PeltonError("the session is closed; open a new one")
        self._checker.check(batch)
        if outputs and self.config.build.profiling == "none":
            raise ConfigError(
                f"{self.engine.path} was built with profiling none, so its tensors have no names; "
                "build it with profiling names for extra outputs"
            )
        for name in outputs:
            if name not in self._names:
                raise ValueError(f"the engine has no tensor {name!r}")
        return self._runner.run(batch, outputs)

    @property
    def samples(self) -> bool:
        """Whether ``submit`` works: the device samples by itself and runs ahead of the host."""
        return self._device is not None

    def submit(self, batch: InputBatch, sampling: SamplingInputs) -> PendingStep:
        """Start a step that samples from each row of its logits (``samples``); at most two may be in flight.

        Ids below zero stand for tokens that the step submitted before samples: -1 for its first row.
        Raises ``ValueError`` when ``batch`` breaks the contract.
        """
        if self._runner is None:
            raise PeltonError("the session is closed; open a new one")
        self._checker.check(batch, unsampled=True)
        return cast(Submitting, self._runner).submit(batch, sampling)

    def update_weights(self, engine: Engine) -> None:
        """Run the weights of ``engine``, which has this one's plan, from the next step on.

        What the KV cache holds was computed with the old weights: whoever drives the session forgets
        it. Other sessions of the same engine keep the old weights. Raises ``EngineError`` when
        ``engine`` has another plan or is stripped; nothing has then changed.
        """
        if self._runner is None:
            raise PeltonError("the session is closed; open a new one")
        engine.require_weights()
        if why := _other_plan(self.engine, engine):
            raise EngineError(
                f"{engine.path} has another {why} than the running {self.engine.path}; "
                "start a new session (or server) for it"
            )
        if isinstance(self._runner, Reloadable):
            try:
                self._runner.reload(engine)
            except Exception as error:  # some are new, some are not: nothing may run on them
                raise RuntimeError(f"the weights could not all be replaced: {error}") from error
            self.engine = engine
            self.weight_epoch += 1
            return
        name: RunnerName = "native" if self.runner_name == "native" else "reference"
        # The old runner stays until the new one is complete, so that there is always a whole one.
        _, runner = self._make_runner(name, engine)
        old, self._runner = self._runner, runner
        self.engine = engine
        self.weight_epoch += 1
        old.close()
        self._prefault.close()
        self._prefault = Prefault(engine.weights.files)

    def close(self) -> None:
        """Free the KV cache and the runner; idempotent."""
        self._prefault.close()
        if self._runner is not None:
            self._runner.close()
        self._runner = None
        self._caches = KVCaches({}, {}, self.num_blocks)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_runner(self, name: RunnerName, engine: Engine) -> tuple[str, Runner]:
        if name not in ("auto", "native", "reference"):
            raise ConfigError(f"unknown runner {name!r} (known: auto, native, reference)")
        if self._device is not None:
            from pelton.engine.cuda.runner import CudaRunner

            with given_back_on_error():
                return "cuda", CudaRunner(engine, self.num_blocks, self._device)
        if name != "reference":
            reason = native_runner.unavailable(engine.plan)
            if reason is None:
                native = native_runner.NativeRunner(
                    engine.plan, engine.weights, self._caches, self.threads, folder=engine.path
                )
                return "native", native
            if name == "native":
                raise EngineError(f"the native library cannot run here: {reason}; use runner='reference'")
            warnings.warn(
                f"the native library cannot run here ({reason}); steps run on the PyTorch reference, "
                "which is many times slower",
                stacklevel=3,
            )
        return "reference", self._reference_runner(engine)

    def _reference_runner(self, engine: Engine) -> Runner:
        try:
            from pelton.engine.reference_runner import ReferenceRunner

            return ReferenceRunner(engine.plan, engine.weights, self._caches, self.threads)
        except ImportError as error:
            raise MissingDependencyError(
                f"the reference runner needs PyTorch ({error}); install it with: pip install 'pelton[build]'"
            ) from error


def _other_plan(old: Engine, new: Engine) -> str | None:
    """What of ``new``, besides weights, is not as in ``old``; None when nothing is."""
    if not is_trusted(new) and _code_hashes(new) != _code_hashes(old):
        return "code (which is not trusted)"
    names = [b.name for b in old.plan.buffers if b.kind in ("weight", "constant")]
    if old.plan != new.plan or any(old.weights.meta[n] != new.weights.meta[n] for n in names):
        return "plan"
    a, b = old.config, new.config
    if a.model.kv_groups != b.model.kv_groups or a.model.vocab_size != b.model.vocab_size:
        return "model"
    return None if a.build == b.build else "build configuration"


def _code_hashes(engine: Engine) -> set[tuple[str, str]]:
    return {(f.path, f.sha256) for f in engine.manifest.files if f.path in engine.code}


def _resolve_threads(config: EngineConfig, threads: int | None) -> int:
    wanted = config.build.threads if threads is None else threads
    assert wanted is not None
    if wanted < 0:
        raise ConfigError(f"threads must be 0 (all cores) or more, not {wanted}")
    available = cores()
    if wanted > available:
        warnings.warn(f"{wanted} threads on {available} cores run slower than {available}", stacklevel=3)
    return wanted or available
