"""Runs a plan in the native library: the way every engine is served on a CPU. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.engine.batch import InputBatch, StepResult
from pelton.engine.kv_cache import KVCaches
from pelton.engine.plan import Plan
from pelton.engine.shards import Shards


def unavailable(plan: Plan) -> str | None:
    """Why ``plan`` cannot run in the native library here; None when it can."""
    return "this version has no native plan runner"


class NativeRunner:
    """Executes ``plan`` over mapped ``weights`` and ``caches`` with a team of ``threads``."""

    def __init__(self, plan: Plan, weights: Shards, caches: KVCaches, threads: int) -> None:
        raise NotImplementedError

    def run(self, batch: InputBatch, outputs: Sequence[str]) -> StepResult:
        """Compute one step; ``outputs`` names operands to copy when they are produced."""
        raise NotImplementedError

    def close(self) -> None:
        """End the threads."""
