"""ExecutorConfig: how an executor serves an engine. Few settings, each bounded by what was built."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from pelton.engine.batch import ModelSession
from pelton.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ExecutorConfig:
    """``None`` means the engine's own limit."""

    max_num_seqs: int | None = None
    """Sequences in one step (the engine's max_batch_size)."""
    max_num_batched_tokens: int | None = None
    """Tokens in one step (the engine's max_num_tokens). Smaller: steadier streams, slower prompts."""
    max_logits_rows: int | None = None
    """Rows of logits in one step (what the engine's plan has room for)."""
    max_waiting: int = 1024
    """Requests that may wait; one more is refused with ``QueueFullError``."""
    enable_prefix_caching: bool = True
    watchdog_seconds: float = 60.0
    """Without progress for this long although there is work, the executor counts as stuck."""

    def resolve(self, session: ModelSession) -> ExecutorConfig:
        """Every field filled in and checked against the engine; raises ``ConfigError``."""
        build = session.config.build
        assert build.max_batch_size and build.max_num_tokens
        resolved = dataclasses.replace(
            self,
            max_num_seqs=_bounded("max_num_seqs", self.max_num_seqs, build.max_batch_size),
            max_num_batched_tokens=_bounded(
                "max_num_batched_tokens", self.max_num_batched_tokens, build.max_num_tokens
            ),
            max_logits_rows=_bounded(
                "max_logits_rows", self.max_logits_rows, _plan_rows(session, build.max_batch_size)
            ),
        )
        assert resolved.max_num_seqs and resolved.max_logits_rows
        if resolved.max_logits_rows < resolved.max_num_seqs:
            raise ConfigError(
                f"max_logits_rows is {resolved.max_logits_rows}, but each of the {resolved.max_num_seqs} "
                "sequences of a step needs a row; raise it or lower max_num_seqs"
            )
        if self.max_waiting < 1:
            raise ConfigError(f"max_waiting is {self.max_waiting}; it must be at least 1")
        if self.watchdog_seconds <= 0:
            raise ConfigError(f"watchdog_seconds is {self.watchdog_seconds}; it must be above 0")
        return resolved


def _bounded(name: str, value: int | None, limit: int) -> int:
    if value is None:
        return limit
    if not 1 <= value <= limit:
        raise ConfigError(f"{name} is {value}; this engine was built for 1 to {limit}")
    return value


def _plan_rows(session: ModelSession, default: int) -> int:
    """Rows of logits the loaded plan has room for, where the session says."""
    engine = getattr(session, "engine", None)
    return default if engine is None else int(engine.plan.dims["N"])
