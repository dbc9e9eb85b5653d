"""Checkpoint in, engine out: the stages of a build in order (docs/design.md, section 4)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import msgspec

from pelton.builder.budget import plan_budget
from pelton.builder.check import check_engine
from pelton.builder.clock import Clock, Progress
from pelton.builder.compile import Compiled, compile_model
from pelton.builder.cubins import check_compilers
from pelton.builder.directory import check_output, check_space, engine_directory
from pelton.builder.dry_run import HeadersOnly, dry_report
from pelton.builder.eager import EagerReference, Reference
from pelton.builder.engine_files import total_size, write_compact, write_json, write_manifest
from pelton.builder.evaluation import blocks_of
from pelton.builder.extensions import write_compiled
from pelton.builder.facts import model_recipes
from pelton.builder.gate import QualityGate, evaluate_text
from pelton.builder.imported_reference import ImportedReference
from pelton.builder.kv_calibration import with_float32_caches
from pelton.builder.launches import plan_launches
from pelton.builder.peak import PeakMemory
from pelton.builder.probe import probe_steps
from pelton.builder.quantized_input import before_calibrating, kv_dtype_of, quantized_input
from pelton.builder.report import BuildReport, QualityReport
from pelton.builder.selection import runs_on_this_cpu
from pelton.builder.summary import build_report, engine_config, machine_report
from pelton.builder.target import device_here, device_of, resolve_target, sm_of, why_not_here
from pelton.builder.timing_cache import encode
from pelton.builder.weights import write_weights
from pelton.dtypes import KV_CODES
from pelton.engine import native_runner
from pelton.engine.artifact import open_engine
from pelton.engine.config import BuildConfig, EngineConfig
from pelton.engine.config_check import check_settings
from pelton.engine.session import Session
from pelton.engine.trust import remember
from pelton.engine.weight_sources import WeightSources, describe
from pelton.errors import ConfigError
from pelton.ir.evaluate import infer_shape
from pelton.models.checkpoint import Checkpoint, open_checkpoint
from pelton.models.registry import create_model
from pelton.models.transformers_import.model import ImportedCausalLM


def build(
    checkpoint: str | Path | Checkpoint,
    config: BuildConfig | None = None,
    *,
    output: str | Path,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
    check: bool = True,
    explain: Callable[[str], None] | None = None,
    timing_cache: str | Path | None = None,
    dry_run: bool = False,
    gate: QualityGate | None = None,
) -> BuildReport:
    """Build the engine of ``checkpoint`` (a Hugging Face folder or GGUF file) in ``output``.

    ``notify`` gets the memory budget and every automatic choice, a sentence each, before weights are
    read. ``explain`` gets what each pass changed, as text. ``check=False`` leaves out the comparison with
    the reference model. ``timing_cache``: a file of times to use and to add to. An engine at ``output`` is
    replaced; anything else there is refused. ``dry_run`` reads no weights and writes nothing: the report
    says what would be built, the memory it needs, and about how long that takes.

    ``gate`` measures the engine on text, and may require how close it is to the unquantised model.

    Raises ``CheckpointError``, ``ConfigError`` (a setting, or not enough memory), ``MissingDependencyError``
    (a compiler) or ``BuildError`` (the engine's results are wrong, or beyond the gate); ``output`` is then as
    it was.
    """
    if gate is not None:
        gate.check()
        if dry_run or not check:
            raise ConfigError("an engine can only be measured on text where it is built and checked")
    output = Path(output)
    say = notify or (lambda text: None)
    replaced = check_output(output)
    clock = Clock(progress or (lambda stage, done, total: None))
    with PeakMemory() as peak, ExitStack() as inputs:
        with clock("open"):
            base = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
        wanted = config or BuildConfig()
        check_settings(wanted)
        if not dry_run and device_of(resolve_target(wanted.target, [])) == "cuda":
            with clock("open"):
                check_compilers()
        if wanted.kv_dtype is None:
            wanted = msgspec.structs.replace(wanted, kv_dtype=kv_dtype_of(wanted.quant))
        if not dry_run and (types := before_calibrating(base, wanted.quant)) is not None:
            # Quantising takes long: what the settings are refused for is said before.
            with clock("open"):
                compile_model(HeadersOnly(types), wanted, Clock(lambda *_: None), may_measure=False)
        with clock("quantise" if wanted.quant else "open"):
            opened = inputs.enter_context(
                quantized_input(base, wanted.quant, output, clock.progress, dry_run=dry_run)
            )
        with clock("open"):
            if dry_run:
                opened = HeadersOnly(opened)
            compiled = compile_model(
                opened,
                wanted,
                clock,
                explain,
                timing_cache=None if timing_cache is None else Path(timing_cache),
                may_measure=not dry_run,
            )
        if dry_run:
            return dry_report(opened, compiled, output, clock.seconds, peak.peak, check=check)
        with engine_directory(output) as folder:
            with clock("tokenizer"):
                (folder / "tokenizer").mkdir()
                opened.write_tokenizer(folder / "tokenizer")
            settled = engine_config(opened, compiled, folder / "tokenizer")
            budget = plan_budget(settled)
            here = budget.notes()
            if replaced:
                here.append(f"{output.name} existed and is replaced")
            for sentence in (budget.text(), *compiled.notes, *here):
                say(sentence)
            check_space(folder, settled.memory.weights)
            with clock("weights"):
                shards, changes = write_weights(
                    folder / "weights", compiled.weights, opened.read, clock.progress
                )
                changes += opened.read_notes()
            write_json(folder / "config.json", settled)
            write_json(folder / "plan.json", compiled.plan)
            write_compiled(compiled.plan, folder)
            write_compact(folder / "weights.json", _weight_sources(opened, compiled))
            if compiled.selected.timing_cache is not None:
                (folder / "timing_cache.json").write_bytes(encode(compiled.selected.timing_cache))
            hashes = {path: sha256 for path, _, sha256 in shards}
            target = str(compiled.config.target)
            unchecked = None
            if device_of(target) == "cuda":
                with clock("kernels"):
                    code = plan_launches(compiled.plan, compiled.selected.choice.tables, sm_of(target))
                    write_compact(
                        folder / "compiled" / "code.json", code.write(folder / "compiled", clock.progress)
                    )
                if reason := why_not_here(target):
                    unchecked = f"the kernels for {target} were compiled, and not run: {reason} here"
            elif reason := native_runner.unavailable(compiled.plan):
                unchecked = f"on this machine the engine runs on the slow PyTorch reference: {reason}"
            runs_here = runs_on_this_cpu(compiled.selected.cpu_level)
            if gate is not None and not runs_here:
                raise ConfigError(
                    f"an engine for CPUs of level {compiled.selected.cpu_level} cannot be measured here; "
                    "build it without max_kl, max_ppl_increase and eval_text"
                )
            if not runs_here:
                changes.append(
                    f"the engine is for CPUs of level {compiled.selected.cpu_level}, so its results were not "
                    "checked here"
                )
            elif unchecked:
                changes.append(unchecked)
            quality = None
            if check and runs_here:
                write_manifest(folder, compiled.plan, hashes, target, compiled.selected.cpu_level)
                with clock("check"):
                    quality = _check(folder, base, opened, compiled, settled, gate)
            report = build_report(opened, compiled, budget, quality, changes)
            (folder / "report.json").write_bytes(report.stored_json())
            write_manifest(folder, compiled.plan, hashes, target, compiled.selected.cpu_level)
            size = total_size(folder)
    remember(open_engine(output))
    machine = machine_report(output, compiled, budget, size, clock.seconds, peak.peak, here)
    return msgspec.structs.replace(report, machine=machine)


def _weight_sources(checkpoint: Checkpoint, compiled: Compiled) -> WeightSources:
    names = dict.fromkeys(name for recipe in compiled.recipes.values() for name in recipe.sources())
    shapes = {name: infer_shape(checkpoint.source(name), checkpoint.tensors) for name in names}
    return describe(checkpoint.name, checkpoint.config, compiled.recipes, shapes, compiled.conditions)


def _check(
    folder: Path,
    base: Checkpoint,
    checkpoint: Checkpoint,
    compiled: Compiled,
    config: EngineConfig,
    gate: QualityGate | None,
) -> QualityReport:
    """Compare the written engine with a fresh model that no pass has touched; on text with ``base``, which
    the build has not quantised."""
    max_seq_len = compiled.config.max_seq_len
    assert max_seq_len is not None
    steps, blocks = probe_steps(config, folder / "tokenizer", seed=len(compiled.weights))
    if compiled.config.fast_build:
        # Each step streams the whole reference model again.
        steps = steps[:1]
    reference: Reference
    exact = compiled.exact
    if isinstance(compiled.model, ImportedCausalLM):
        reference = ImportedReference(compiled.model, checkpoint.source, checkpoint.read, steps, max_seq_len)
        # It caches nothing, so what a 16-bit cache rounds shows.
        exact = exact and compiled.config.kv_dtype == "float32"
    else:
        model = create_model(checkpoint.config, max_seq_len=max_seq_len)
        recipes = model_recipes(model, checkpoint.source)
        kept = with_float32_caches(config) if config.build.kv_dtype in KV_CODES else config
        reference = EagerReference(model, recipes, checkpoint.read, kept, blocks)
    if device_of(str(compiled.config.target)) == "cuda":
        native = device_here(str(compiled.config.target)) is not None
    else:
        native = native_runner.unavailable(compiled.plan) is None
    runner: Literal["native", "reference"] = "native" if native else "reference"
    with Session(folder, kv_blocks=blocks, runner=runner, trust=True) as session:
        quality = check_engine(session, reference, steps, exact=exact)
    if gate is None:
        return quality
    del reference
    blocks = blocks_of(config)
    with Session(folder, kv_blocks=blocks, runner=runner, trust=True) as session:
        found = evaluate_text(gate, folder / "tokenizer", session, base)
    return msgspec.structs.replace(quality, evaluation=found)
