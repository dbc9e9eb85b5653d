"""Runs a plan in the native library: the way every engine is served on a CPU. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pelton.engine.batch import InputBatch, StepResult
from pelton.engine.kv_cache import KVCaches
from pelton.engine.native_plan import NativePlan
from pelton.engine.plan import Plan
from pelton.engine.shards import Shards
from pelton.errors import MissingDependencyError
from pelton.kernels import native


def unavailable(plan: Plan) -> str | None:
    """Why ``plan`` cannot run in the native library here; None when it can."""
    without = sorted({i.op for i in plan.instructions if not i.tactics})
    if without:
        return f"the engine has no native kernels for {', '.join(without)}"
    try:
        native.load_library()
    except MissingDependencyError as error:
        return str(error)
    kernels = native.kernel_levels()
    unknown = sorted(
        {
            c.tactic
            for i in plan.instructions
            for c in i.tactics
            if c.tactic not in kernels and c.tactic not in plan.external
        }
    )
    if unknown:
        return f"it has no kernel {', '.join(unknown)} for this CPU ({native.cpu_level()})"
    return None


class NativeRunner:
    """Executes ``plan`` over mapped ``weights`` and ``caches`` with a team of ``threads``.

    ``folder``: the engine's, where its compiled code is. ``poison`` fills the arena with NaN before each
    step (tests).
    """

    def __init__(
        self,
        plan: Plan,
        weights: Shards,
        caches: KVCaches,
        threads: int,
        *,
        folder: Path | None = None,
        poison: bool = False,
    ) -> None:
        names = [b.name for b in plan.buffers if b.kind in ("weight", "constant")]
        layers = range(len(caches.k))
        self.plan = NativePlan(
            plan,
            {name: weights[name] for name in names},
            [caches.k[layer] for layer in layers],
            [caches.v[layer] for layer in layers],
            threads=threads,
            folder=folder,
            poison=poison,
        )

    def run(self, batch: InputBatch, outputs: Sequence[str]) -> StepResult:
        """Compute one step; ``outputs`` names operands to copy when they are produced."""
        logits, taken = self.plan.run(batch, outputs)
        return StepResult(logits_NV=logits, outputs=taken)

    def close(self) -> None:
        """End the threads."""
        self.plan.close()
