"""What a build says of itself: the engine's configuration and the report, from what was compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pelton.builder.budget import Budget, kv_bytes_per_token
from pelton.builder.compile import Compiled
from pelton.builder.facts import model_config, quant_elements
from pelton.builder.lower import arena_lower_bound, input_bytes
from pelton.builder.report import BuildReport, MachineReport, MemoryReport, QualityReport
from pelton.builder.tactic_report import tactic_reports
from pelton.builder.weights import stored_bytes
from pelton.engine.config import EngineConfig, MemoryPlan
from pelton.models.checkpoint import Checkpoint


def engine_config(checkpoint: Checkpoint, compiled: Compiled, tokenizer: Path | None) -> EngineConfig:
    """``config.json``; ``tokenizer``: the engine's folder of it, None where it is not written."""
    model = model_config(checkpoint, compiled.model, compiled.architecture, tokenizer)
    kv_dtype = compiled.config.kv_dtype
    assert kv_dtype is not None
    return EngineConfig(
        model=model,
        build=compiled.config,
        memory=MemoryPlan(
            weights=sum(spec.meta.nbytes for spec in compiled.weights),
            arena=compiled.plan.arena_bytes,
            workspace=compiled.plan.workspace_bytes,
            inputs=input_bytes(compiled.plan),
            kv_bytes_per_token=kv_bytes_per_token(model.kv_groups, kv_dtype),
        ),
    )


def build_report(
    checkpoint: Checkpoint,
    compiled: Compiled,
    budget: Budget,
    quality: QualityReport | None,
    changes: Sequence[str] = (),
) -> BuildReport:
    """The report without its machine part; ``changes``: what became of weights, a sentence each."""
    return BuildReport(
        checkpoint=checkpoint.name,
        architecture=compiled.architecture,
        num_parameters=budget.config.model.num_parameters,
        checkpoint_quants=quant_elements(checkpoint),
        checkpoint_bytes=sum(info.nbytes for info in checkpoint.tensors.values()),
        stored=stored_bytes(compiled.weights),
        memory=MemoryReport(
            weights=budget.memory.weights,
            work=budget.work,
            arena_lower_bound=arena_lower_bound(compiled.program, compiled.plan.dims),
        ),
        passes=compiled.passes,
        tactics=tactic_reports(compiled.selected.choice),
        candidates=compiled.selected.choice.candidates,
        quality=quality,
        notes=(*compiled.notes, *changes),
    )


def machine_report(
    output: Path,
    compiled: Compiled,
    budget: Budget,
    engine_bytes: int,
    seconds: Mapping[str, float],
    peak_build: int,
    notes: Sequence[str],
) -> MachineReport:
    """What the build was like here."""
    return MachineReport(
        engine=output.name,
        engine_bytes=engine_bytes,
        kv=budget.kv_bytes,
        kv_tokens=budget.kv_tokens,
        free=budget.free,
        longest_context=budget.longest_context,
        timed=compiled.selected.timed,
        cached=compiled.selected.cached,
        peak_build=peak_build,
        notes=tuple(notes),
        seconds=dict(seconds),
    )
