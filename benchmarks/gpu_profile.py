"""Where a step of a GPU engine spends its time: kernels grouped, each beside its own floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_steps import Driver

from pelton.engine.batch import InputBatch
from pelton.engine.cost import Cost, StepShape, step_costs
from pelton.engine.plan import Instruction
from pelton.engine.profile_trace import tactics_of

#: What an H200 was measured to do in a second: bytes moved, operations of bfloat16 products.
BYTES, OPERATIONS = 4.3e12, 790e12


@dataclass(frozen=True)
class Span:
    """The instructions of a kind, all layers together."""

    name: str
    tactic: str
    calls: int
    ms: float
    share: float
    floor_ms: float
    """Its bytes or operations at the GPU's rates, whichever takes longer."""

    @property
    def of_floor(self) -> float:
        """Share of what the GPU could do."""
        return self.floor_ms / self.ms if self.ms else 0.0

    def record(self) -> dict[str, Any]:
        return {
            "span": self.name,
            "tactic": self.tactic,
            "calls": self.calls,
            "ms": round(self.ms, 4),
            "share": round(self.share, 4),
            "of_floor": round(self.of_floor, 3),
        }


def kind(instruction: Instruction) -> str:
    """The op and, of those that a layer has several of, which one."""
    where = instruction.name.split(".")
    return (
        f"{instruction.op} {where[-2]}" if "linear" in instruction.op and len(where) > 1 else instruction.op
    )


def floor_ms(cost: Cost) -> float:
    """Milliseconds that bytes or operations take at least; activations count, as in long steps they do not
    stay in the caches."""
    return 1e3 * max((cost.memory + cost.activations) / BYTES, cost.operations / OPERATIONS)


def profile(driver: Driver, batch: InputBatch) -> list[Span]:
    """The spans of a step, slowest first. Kernels are timed one after another, without overlap."""
    runner: Any = driver.session._runner
    lengths = batch.groups[0].cu_seqlens
    shape = StepShape(
        new=tuple((lengths[1:] - lengths[:-1]).tolist()),
        keys=tuple(batch.groups[0].seq_lens_B.tolist()),
        logits=len(batch.logits_indices_N),
    )
    plan = driver.session.engine.plan
    timed = runner.profile(batch)
    groups: dict[tuple[str, str], list[tuple[float, Cost]]] = {}
    tactics = tactics_of(plan, sum(shape.new), shape.logits)
    for (instruction, ms), tactic, cost in zip(timed, tactics, step_costs(plan, shape), strict=True):
        groups.setdefault((kind(instruction), tactic), []).append((ms, cost))
    total = sum(ms for _, ms in timed)
    spans = [
        Span(
            name=name,
            tactic=tactic,
            calls=len(members),
            ms=sum(ms for ms, _ in members),
            share=sum(ms for ms, _ in members) / total,
            floor_ms=sum(floor_ms(cost) for _, cost in members),
        )
        for (name, tactic), members in groups.items()
    ]
    return sorted(spans, key=lambda span: -span.ms)


def profiles(
    driver: Driver, tests: Sequence[tuple[str, int]], served: Mapping[tuple[str, int], float]
) -> Any:
    """Print and return the profile of each (test, size) of ``h200.TABLE``; ``served``: milliseconds there."""
    found = []
    for test, size in tests:
        if test == "c":
            batch = driver.batch(size, [size], -(-size // 16))
        else:
            keys = [256] if test == "b" else [1025 + 7 * (b % 8) for b in range(size)]
            batch = driver.batch(1, keys, -(-max(keys) // 16))
        spans = profile(driver, batch)
        total = sum(span.ms for span in spans)
        served_ms = served.get((test, size), 0.0)
        print(f"-- {test} {size}: kernels {total:.3f} ms one by one, served {served_ms:.3f} ms")
        print(f"   {'span':<34}{'tactic':<34}{'calls':>6}{'ms':>9}{'share':>8}{'of floor':>9}")
        for span in spans[:8]:
            print(
                f"   {span.name:<34}{span.tactic:<34}{span.calls:>6}{span.ms:>9.3f}{span.share:>8.1%}"
                f"{span.of_floor:>9.0%}"
            )
        found.append(
            {
                "test": test,
                "size": size,
                "served_ms": round(served_ms, 3),
                "kernels_ms": round(total, 3),
                "spans": [span.record() for span in spans],
            }
        )
    return found
