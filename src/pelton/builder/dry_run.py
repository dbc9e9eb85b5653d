"""A build that stops before the weights: what would be built, the memory it needs, how long it takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from pelton.builder.budget import plan_budget
from pelton.builder.compile import Compiled
from pelton.builder.measure import BUDGET
from pelton.builder.report import BuildReport
from pelton.builder.summary import build_report, engine_config, machine_report
from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.kv_quant import KVQuant
from pelton.ir.recipe import Recipe
from pelton.ir.tensors import HostTensor, ValuesNotRead
from pelton.models.checkpoint import Checkpoint
from pelton.models.checkpoint.base import is_order
from pelton.passes.run import NOT_TRIED

#: What a build does in a second, measured on 2 cores of a server (benchmarks/build.py): bytes of weights
#: packed and hashed, by kind, and parameters through the reference model, for each step of the check.
_PACKED = {"dense": 0.25e9, "blocks": 0.15e9}
_CHECKED = 0.2e9
#: Seconds to time the tactics of a call.
_TIMED = 0.4


class HeadersOnly(Checkpoint):
    """A checkpoint of which only headers may be looked at: ``read`` raises ``ValuesNotRead`` but for orders
    of columns, which are as small as they matter to what is built."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.name, self.path = checkpoint.name, checkpoint.path
        self.config, self.generation_config = checkpoint.config, checkpoint.generation_config
        self.tensors = checkpoint.tensors
        self.zero_biases = checkpoint.zero_biases

    def activation_quant(self, name: str) -> ActivationQuant | None:
        return self._checkpoint.activation_quant(name)

    def kv_quant(self) -> KVQuant | None:
        return self._checkpoint.kv_quant()

    def read(self, name: str) -> HostTensor:
        if is_order(self.tensors[name]):
            return self._checkpoint.read(name)
        raise ValuesNotRead(name)

    def source(self, name: str) -> Recipe:
        return self._checkpoint.source(name)

    def write_tokenizer(self, directory: Path) -> None:
        raise AssertionError("a dry run writes nothing")

    def files(self) -> Iterable[Path]:
        return self._checkpoint.files()


def dry_report(
    checkpoint: Checkpoint,
    compiled: Compiled,
    output: Path,
    seconds: Mapping[str, float],
    peak_build: int,
    *,
    check: bool,
) -> BuildReport:
    """The report of the build that would come. Raises ``ConfigError`` when its engine would not fit."""
    config = engine_config(checkpoint, compiled, None)
    budget = plan_budget(config)
    notes, untimed = budget.notes(), compiled.selected.untimed if compiled.config.timing else 0
    notes += [f"{p.name} was {p.note}" for p in compiled.passes if p.note.startswith(NOT_TRIED)]
    if untimed:
        notes.append(f"{untimed} kinds of calls would be timed")
    machine = machine_report(output, compiled, budget, config.memory.weights, seconds, peak_build, notes)
    rest = min(BUDGET, untimed * _TIMED) + _expected_seconds(compiled, check)
    machine = msgspec.structs.replace(machine, expected_seconds=sum(seconds.values()) + rest)
    return msgspec.structs.replace(build_report(checkpoint, compiled, budget, None), machine=machine)


def _expected_seconds(compiled: Compiled, check: bool) -> float:
    """About how long weights and check take."""
    packed = sum(
        spec.meta.nbytes / _PACKED["blocks" if spec.blocks else "dense"] for spec in compiled.weights
    )
    steps = (1 if compiled.config.fast_build else 2) if check else 0
    parameters: int = sum(math.prod(p.shape) for p in compiled.model.parameters())
    return packed + steps * parameters / _CHECKED
