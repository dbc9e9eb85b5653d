"""How to open an executor: what travels to the process that will hold it."""

from __future__ import annotations

import importlib

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
    kv_blocks: tuple[int, ...] | None = None
    """Blocks of each KV group (what the engine's limits need, or what fits)."""
    executor: ExecutorConfig = ExecutorConfig()
    session: str = "pelton.engine.session:Session"
    """``module:callable`` that makes the session; tests put a fake here."""

    def open(self, engine: Engine | None = None) -> Executor:
        """Load the engine (``engine``: opened already). Raises ``EngineError`` or ``ConfigError``."""
        module, _, name = self.session.partition(":")
        factory = getattr(importlib.import_module(module), name)
        session = factory(engine or self.engine, threads=self.threads, kv_blocks=self.kv_blocks)
        try:
            return Executor(session, self.executor)
        except BaseException:
            session.close()
            raise


def close_executor(executor: Executor) -> None:
    """Close an executor that ``ExecutorSpec.open`` made, and its session."""
    executor.close()
    executor.session.close()
