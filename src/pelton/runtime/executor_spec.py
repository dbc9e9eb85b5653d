"""How to open an executor: what travels to the process that will hold it."""

from __future__ import annotations

import importlib
from typing import Any

import msgspec

from pelton.engine.artifact import Engine
from pelton.runtime.config import ExecutorConfig
from pelton.runtime.executor import Executor


class ExecutorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An engine, how much of the machine it gets, and how it is scheduled."""

    engine: str
    """The engine directory."""
    threads: int | None = None
    """CPU threads (as built)."""
    gpu_memory_fraction: float | None = None
    """Share of a GPU's free memory (as built)."""
    kv_blocks: tuple[int, ...] | None = None
    """Blocks of each KV group (what the engine's limits need, or what fits)."""
    trust: bool = False
    """Run code that the engine carries although it was not built here."""
    executor: ExecutorConfig = ExecutorConfig()
    session: str = "pelton.engine.session:Session"
    """``module:callable`` that makes the session; tests put a fake here."""

    def open(self, engine: Engine | None = None) -> Executor:
        """Load the engine (``engine``: opened already). Raises ``EngineError`` or ``ConfigError``."""
        module, _, name = self.session.partition(":")
        factory = getattr(importlib.import_module(module), name)
        options: dict[str, Any] = {"threads": self.threads, "kv_blocks": self.kv_blocks}
        if self.gpu_memory_fraction is not None:
            options["gpu_memory_fraction"] = self.gpu_memory_fraction
        if self.trust:
            options["trust"] = True
        session = factory(engine or self.engine, **options)
        try:
            return Executor(session, self.executor)
        except BaseException:
            session.close()
            raise


def close_executor(executor: Executor) -> None:
    """Close an executor that ``ExecutorSpec.open`` made, and its session."""
    executor.close()
    executor.session.close()
