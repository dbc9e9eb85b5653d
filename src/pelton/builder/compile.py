"""From a checkpoint to a plan: everything of a build that reads no weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pelton import nn
from pelton.builder.calls import Program, Root, extract
from pelton.builder.clock import Clock
from pelton.builder.extensions import load_plugins, notes_on, usable, with_extensions
from pelton.builder.facts import (
    checkpoint_facts,
    expected_tensors,
    unapplied_quantisation,
)
from pelton.builder.kv_calibration import (
    Rounding,
    checkpoint_scales,
    see,
    unmeasured_rounding,
    unmeasured_scales,
)
from pelton.builder.lower import lower
from pelton.builder.plugins import keeps_apart
from pelton.builder.profiles import step_limits
from pelton.builder.profiling import with_names
from pelton.builder.report import PassReport
from pelton.builder.resolve import check_model_impl, resolve
from pelton.builder.selection import CudaSelector, Selected, Selector
from pelton.builder.sources import readable, resolve_sources
from pelton.builder.tactics import supporting
from pelton.builder.target import block_types, device_of
from pelton.builder.trace import trace
from pelton.builder.weights import WeightSpec, exact_types, is_rounded, stored_quant
from pelton.dtypes import KV_CODES
from pelton.engine.config import BuildConfig
from pelton.engine.plan import Plan
from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.condition import SameValues
from pelton.ir.evaluate import evaluate, infer_quant, infer_shape
from pelton.ir.graph import Graph
from pelton.ir.printer import condense
from pelton.ir.recipe import Recipe
from pelton.models.checkpoint import Checkpoint, check_tensors
from pelton.models.registry import architecture_of, create_model
from pelton.passes import (
    PASSES,
    PassContext,
    quantise_results,
    run_graph_passes,
    run_model_passes,
    static_inputs,
)
from pelton.passes import PassReport as PassOutcome


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A model turned into a plan; no weight has been read."""

    config: BuildConfig
    """Resolved."""
    architecture: str
    model: nn.CausalLM
    """After the model passes."""
    plan: Plan
    program: Program
    weights: tuple[WeightSpec, ...]
    """In the plan's order."""
    recipes: dict[str, Recipe]
    """Of each weight, over tensors of the Hugging Face model, whatever the checkpoint's format."""
    conditions: tuple[SameValues, ...]
    """What passes found to hold of the checkpoint's values."""
    passes: tuple[PassReport, ...]
    notes: tuple[str, ...]
    selected: Selected
    """How tactics were chosen."""
    rounded: bool
    """Some weight is stored with fewer bits than the checkpoint has."""

    @property
    def exact(self) -> bool:
        """Whether the engine computes the checkpoint's own values in float32."""
        if (
            self.rounded
            or self.config.kv_dtype in KV_CODES
            or self.config.activations not in ("float32", "int8")
        ):
            return False
        return self.config.activations == "float32" or not any(spec.blocks for spec in self.weights)


def compile_model(
    checkpoint: Checkpoint,
    wanted: BuildConfig,
    clock: Clock,
    explain: Callable[[str], None] | None = None,
    timing_cache: Path | None = None,
    may_measure: bool = True,
) -> Compiled:
    """Resolve ``wanted``, make the model, run passes, trace, choose tactics, plan memory.

    ``explain`` gets what each pass changed, as text; ``timing_cache`` is read and
    updated. ``may_measure=False`` takes the default order of tactics where that has no times, and ones for
    scales of KV caches.

    Raises ``ConfigError``, ``CheckpointError`` or ``BuildError``.
    """
    # The model's limits are needed to resolve the settings that the model is made with.
    impl = check_model_impl(wanted.model_impl)
    draft = create_model(checkpoint.config, max_seq_len=wanted.max_seq_len or 2, impl=impl)
    config, notes = resolve(wanted, checkpoint_facts(checkpoint, draft))
    assert config.max_seq_len and config.block_size and config.kv_dtype and config.activations
    assert config.max_num_tokens and config.max_batch_size and config.dtype
    same = config.max_seq_len == wanted.max_seq_len
    model = draft if same else create_model(checkpoint.config, max_seq_len=config.max_seq_len, impl=impl)
    notes += model.notes
    notes += check_tensors(
        expected_tensors(model),
        checkpoint,
        ignore=model.unused_tensors,
        tied_head=next(iter(model.tied().items()), None),
    )
    notes += [f"{info.name}: {info.note}" for info in checkpoint.tensors.values() if info.note]
    notes += [f"config.json: {key} is not known and has no effect" for key in model.ignored_options]
    infos = readable(checkpoint)
    load_plugins()
    assert config.target is not None
    assert config.cpu_level is not None
    on_gpu, native = device_of(config.target) == "cuda", block_types(config.target)
    selector: Selector | CudaSelector
    if on_gpu:
        selector = CudaSelector(config, timing_cache)
    else:
        selector = Selector(config, timing_cache, may_measure=may_measure)
    dtype = config.dtype

    def quant_of(recipe: Recipe) -> str:
        return infer_quant(resolve_sources(recipe, checkpoint.source), infos)

    kv_scales, seen = checkpoint_scales(checkpoint, model, config.kv_dtype), None
    key_rounding: Rounding = {}
    # Of int8, whose errors are as large at 0, a first key far from the rest costs more than is gained.
    by_queries = config.kv_dtype == "float8_e4m3fn"
    if kv_scales is not None:
        notes.append("scales of KV caches are the checkpoint's")
    elif config.kv_dtype in KV_CODES and may_measure:
        with clock("kv scales"):
            seen = see(checkpoint, model, config, rounding=by_queries)
    elif config.kv_dtype in KV_CODES:
        kv_scales = unmeasured_scales(model)
        key_rounding = unmeasured_rounding(model) if by_queries else {}

    def stored(recipe: Recipe) -> str:
        quant, shape = infer_quant(recipe, infos), infer_shape(recipe, infos)
        return stored_quant(quant, shape, dtype, native, exact=exact_types(config))

    def input_quants(recipe: Recipe) -> tuple[ActivationQuant | None, ...]:
        return tuple(checkpoint.activation_quant(name) for name in recipe.sources()) if on_gpu else ()

    context = PassContext(
        quant_of=quant_of,
        resolve=lambda recipe: resolve_sources(recipe, checkpoint.source),
        read=lambda recipe: evaluate(resolve_sources(recipe, checkpoint.source), checkpoint.read),
        stored_quant=lambda recipe, _: stored(resolve_sources(recipe, checkpoint.source)),
        activations=config.activations,
        input_quants=input_quants,
        kv_scales=kv_scales or {},
        key_rounding=key_rounding,
        key_sizes=seen.key_sizes() if seen is not None and config.kv_dtype == "int8" else {},
        has_tactic=lambda spec: (
            not keeps_apart(config.plugins, spec.op)
            and any(not t.largest_tokens for t in supporting(spec, selector.tactics))
        ),
        modes=config.passes,
        fast=bool(config.fast_build),
    )
    with clock("passes"):
        outcomes = run_model_passes(PASSES, model, context, explain)
    if seen is not None:
        kv_scales, key_rounding = seen.scales(model, config.kv_dtype)
        context = replace(context, kv_scales=kv_scales, key_rounding=key_rounding)
        seen = None
    with clock("trace"):
        graph = trace(
            model,
            max_seq_len=config.max_seq_len,
            block_size=config.block_size,
            kv_dtype=config.kv_dtype,
            dtype=config.dtype if on_gpu else "float32",
        )
    with clock("plan"):
        outcomes += run_graph_passes(PASSES, graph, context, explain)
        changed = {outcome.name: outcome.changed for outcome in outcomes}
        notes += unapplied_quantisation(
            checkpoint,
            config.activations,
            config.kv_dtype,
            on_gpu=on_gpu,
            static=changed[static_inputs.NAME] > 0,
            left=changed[quantise_results.NAME],
            deterministic=bool(config.deterministic),
        )
        program = extract(graph)
        sources = _sources(graph, program, checkpoint.source)
        quants = {
            root: stored(source) if isinstance(source, Recipe) else "float32"
            for root, source in sources.items()
        }
    with clock("tactics"):
        selector.tactics, dropped = usable(
            program, quants, selector.tactics, config.activations, config.cpu_level, config.plugins
        )
        notes += dropped
        selected = selector.choose(program, quants)
    with clock("plan"):
        plan = lower(program, selected.choice, quants, step_limits(config))
        plan = with_extensions(plan, selector.tactics, config.cpu_level)
        plan = with_names(plan, str(config.profiling))
        notes += notes_on(plan)
    return Compiled(
        config=config,
        architecture=architecture_of(checkpoint.config),
        model=model,
        plan=plan,
        program=program,
        selected=selected,
        weights=tuple(_specs(plan, sources)),
        recipes=_plain_recipes(plan, graph.recipes),
        conditions=tuple(c for o in outcomes for c in o.conditions),
        passes=tuple(_pass_report(o, context.modes.get(o.name, "auto")) for o in outcomes),
        notes=(*notes, *selected.choice.notes),
        rounded=any(
            is_rounded(infer_quant(source, infos), quants[root])
            for root, source in sources.items()
            if isinstance(source, Recipe)
        ),
    )


Source = Recipe | npt.NDArray[np.float32]


def _sources(graph: Graph, program: Program, source: Callable[[str], Recipe]) -> dict[Root, Source]:
    """How each weight and constant that some call uses is made."""
    found: dict[Root, Source] = {}
    for call in program.calls:
        for value in call.inputs:
            if value is None or value.root.source is None or value.root in found:
                continue
            if value.root.source.kind == "weight":
                found[value.root] = resolve_sources(graph.recipes[value.root.name], source)
            elif value.root.source.kind == "constant":
                found[value.root] = graph.constants[value.root.name].float().numpy()
    return found


def _specs(plan: Plan, sources: Mapping[Root, Source]) -> list[WeightSpec]:
    by_name = {root.name: source for root, source in sources.items()}
    specs = []
    for buffer in plan.buffers:
        if buffer.kind in ("weight", "constant"):
            shape = tuple(d for d in buffer.shape if isinstance(d, int))
            specs.append(
                WeightSpec(
                    name=buffer.name,
                    source=by_name[buffer.name],
                    quant=buffer.quant,
                    layout=buffer.layout,
                    shape=shape,
                )
            )
    return specs


def _plain_recipes(plan: Plan, recipes: Mapping[str, Recipe]) -> dict[str, Recipe]:
    return {b.name: recipes[b.name] for b in plan.buffers if b.kind == "weight"}


def _pass_report(outcome: PassOutcome, choice: str) -> PassReport:
    skipped: dict[str, int] = {}
    for _, why in outcome.skipped:
        skipped[why] = skipped.get(why, 0) + 1
    return PassReport(
        name=outcome.name,
        matched=outcome.matched,
        changed=outcome.changed,
        skipped=skipped,
        choice=choice,
        note=outcome.note,
        diff=condense(outcome.diff),
    )
