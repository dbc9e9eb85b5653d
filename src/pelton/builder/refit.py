"""New weights in an engine: same plan, no rebuild. No torch.

The engine keeps how each weight is made (``weights.json``) and how it is stored (its plan), so a
checkpoint of the same model goes through the stages of a build that touch weights, and no other:
read -> recipe -> type -> layout -> shard. What the plan or a pass relied on is looked at again first.
"""

from __future__ import annotations

import fnmatch
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from pelton.builder.clock import Progress
from pelton.builder.directory import check_output, check_space, engine_directory
from pelton.builder.engine_files import file_entries, write_compact, write_json
from pelton.builder.sources import readable, resolve_sources
from pelton.builder.target import block_types
from pelton.builder.weights import Packed, WeightSpec, exact_types, stored_quant, write_weights
from pelton.engine.artifact import Engine, file_sha256, open_engine
from pelton.engine.plan import Buffer
from pelton.engine.resources import human_bytes
from pelton.engine.trust import is_trusted, remember
from pelton.engine.weight_sources import WeightSources, conditions_of, difference, recipes_of, relevant
from pelton.errors import CheckpointError, ConfigError, EngineError
from pelton.ir.condition import SameValues, broken
from pelton.ir.evaluate import infer_quant, infer_shape
from pelton.ir.recipe import Recipe
from pelton.models.checkpoint import Checkpoint, TensorInfo, open_checkpoint


class RefitReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a refit did."""

    engine: str
    checkpoint: str
    weights: int
    """Made anew."""
    kept: int
    """Left as they were."""
    nbytes: int
    """Of all weights."""
    notes: tuple[str, ...]
    seconds: float

    def text(self) -> str:
        """For people."""
        what = f"{self.weights} weights of {self.checkpoint}" + (f", {self.kept} kept" if self.kept else "")
        lines = [f"  note        {note}" for note in self.notes]
        return "\n".join(
            [*lines, f"  {self.engine}  {what}, {human_bytes(self.nbytes)} in {self.seconds:.1f} s"]
        )


def refit(
    engine: str | Path,
    checkpoint: str | Path | Checkpoint,
    *,
    names: Sequence[str] = (),
    output: str | Path | None = None,
    progress: Progress | None = None,
) -> RefitReport:
    """Put the weights of ``checkpoint`` into ``engine``, in place or as a new engine at ``output``.

    ``names``: shell patterns; only weights of the engine that have such a name, or are made from a
    checkpoint tensor that has, are made anew, the others kept. The engine is replaced in one step at
    the end: whatever happens before, it is as it was. Its tokenizer stays.

    Raises ``EngineError`` (damaged, or not refittable), ``CheckpointError`` (of another model, a
    tensor missing or of another type) or ``ConfigError`` (names that fit nothing, no space).
    """
    started = time.perf_counter()
    # What is kept goes under a new hash: damage must not.
    old = open_engine(engine, verify=bool(names))
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    with ExitStack() as inputs:
        quant = old.config.build.quant
        if quant not in (None, "none"):
            # Of quantising alone: torch is not needed otherwise.
            from pelton.builder.quantized_input import quantized_input

            opened = inputs.enter_context(quantized_input(opened, quant, old.path, progress or _quiet))
        return _refit(old, opened, names=names, output=output, progress=progress or _quiet, started=started)


def _quiet(stage: str, done: int, total: int) -> None:
    """No progress."""


def _refit(
    old: Engine,
    opened: Checkpoint,
    *,
    names: Sequence[str],
    output: str | Path | None,
    progress: Progress,
    started: float,
) -> RefitReport:
    sources = _sources(old)
    _check_model(old, sources, opened)
    chosen = _choose(old, recipes_of(sources), names)
    conditions = conditions_of(sources)
    read = [name for recipe in chosen.values() for name in recipe.sources()]
    conditions = tuple(c for c in conditions if not {*c.a.sources(), *c.b.sources()}.isdisjoint(read))
    read += [name for c in conditions for name in (*c.a.sources(), *c.b.sources())]
    _check_present(old, sources, opened, read)
    specs = _specs(old, opened, chosen)
    for condition in conditions:
        if why := broken(_resolved(condition, opened), opened.read):
            raise CheckpointError(
                f"{opened.name} does not fit {old.path}: its plan relies on a pass ({condition.why}) "
                f"that needs equal values, but {why}; rebuild: pelton build {opened.path}"
            )
    _check_input_scales(old, chosen, opened)
    # A link to an engine stays one.
    target = Path(output) if output is not None else old.path.resolve()
    check_output(target)
    with engine_directory(target) as folder:
        _copy_others(old, folder)
        check_space(folder, old.config.memory.weights)
        shards, notes = write_weights(folder / "weights", specs, opened.read, progress)
        for path, nbytes, sha256 in shards:
            if path.stat().st_size != nbytes or file_sha256(path) != sha256:
                raise EngineError(f"{path} does not read back as it was written; the disk may be failing")
        _write_descriptions(folder, old, opened, sources, partial=bool(names), count=len(chosen))
        hashes = {path: sha256 for path, _, sha256 in shards}
        manifest = msgspec.structs.replace(old.manifest, stripped=False, files=file_entries(folder, hashes))
        write_json(folder / "manifest.json", manifest)
    if is_trusted(old):
        remember(open_engine(target))
    return RefitReport(
        engine=target.name,
        checkpoint=opened.name,
        weights=len(chosen),
        kept=len(recipes_of(sources)) - len(chosen),
        nbytes=old.config.memory.weights,
        notes=tuple(notes),
        seconds=time.perf_counter() - started,
    )


def _check_input_scales(old: Engine, chosen: Mapping[str, Recipe], opened: Checkpoint) -> None:
    """Static scales of inputs are in the plan. Raises ``CheckpointError`` where ``opened`` has others."""
    plan = old.plan
    for instruction in plan.instructions:
        name = (
            plan.buffers[plan.operands[instruction.inputs[1]].buffer].name if instruction.inputs[1:] else ""
        )
        if "x_scale" not in instruction.attrs or name not in chosen:
            continue
        quants = map(opened.activation_quant, chosen[name].sources())
        found = max((quant.scale for quant in quants if quant is not None), default=0.0)
        if found != instruction.attrs["x_scale"]:
            raise CheckpointError(
                f"{opened.name} does not fit {old.path}: its plan rounds the input of {name} with the static "
                f"scale {instruction.attrs['x_scale']:g}, and the checkpoint has {found:g}; rebuild: pelton "
                f"build {opened.path}"
            )


def _sources(engine: Engine) -> WeightSources:
    sources = engine.weight_sources()
    try:
        names = recipes_of(sources).keys()
        conditions_of(sources)
    except ValueError as error:
        raise EngineError(f"{engine.path}: weights.json: {error}; rebuild the engine") from error
    without = [b.name for b in engine.plan.buffers if b.kind == "weight" and b.name not in names]
    if without:
        raise EngineError(
            f"{engine.path} does not say how its weight {without[0]} is made; rebuild the engine"
        )
    return sources


def _check_model(engine: Engine, sources: WeightSources, checkpoint: Checkpoint) -> None:
    """Raise ``CheckpointError`` unless ``checkpoint`` computes as the engine's plan does."""
    again = f"rebuild: pelton build {checkpoint.path}"
    architecture = (checkpoint.config.get("architectures") or ["?"])[0]
    if architecture != engine.config.model.architecture:
        raise CheckpointError(
            f"{checkpoint.name} is a {architecture} and {engine.path} was built from a "
            f"{engine.config.model.architecture}; {again}"
        )
    if different := difference(sources.config, relevant(checkpoint.config)):
        raise CheckpointError(
            f"{checkpoint.name} is another model than {engine.path} was built from "
            f"({sources.checkpoint}): in its config, {different}; {again}"
        )


def _choose(engine: Engine, recipes: Mapping[str, Recipe], names: Sequence[str]) -> dict[str, Recipe]:
    """The weights to make anew. Raises ``ConfigError`` for a pattern that fits none."""
    used = {b.name for b in engine.plan.buffers if b.kind == "weight"}
    recipes = {name: recipe for name, recipe in recipes.items() if name in used}
    if not names:
        return recipes
    chosen: set[str] = set()
    for pattern in names:
        found = {
            name
            for name, recipe in recipes.items()
            if any(fnmatch.fnmatchcase(n, pattern) for n in (name, *recipe.sources()))
        }
        if not found:
            raise ConfigError(
                f"no weight of {engine.path} has a name like {pattern!r}; it has {next(iter(recipes))} "
                f"and {len(recipes) - 1} more (pelton inspect {engine.path} --plan)"
            )
        chosen |= found
    if engine.stripped and len(chosen) < len(recipes):
        raise ConfigError(
            f"{engine.path} is stripped, so there is nothing to keep: refit all of its weights, without names"
        )
    return {name: recipe for name, recipe in recipes.items() if name in chosen}


def _specs(engine: Engine, checkpoint: Checkpoint, chosen: Mapping[str, Recipe]) -> list[WeightSpec]:
    """Every tensor of the engine, checked against what the checkpoint has."""
    recipes = {name: resolve_sources(recipe, checkpoint.source) for name, recipe in chosen.items()}
    infos = readable(checkpoint)
    dtype = engine.config.build.dtype
    assert dtype is not None
    specs = []
    for buffer in engine.plan.buffers:
        if buffer.kind not in ("weight", "constant"):
            continue
        source: Recipe | Packed
        if buffer.name in recipes:
            source = recipes[buffer.name]
            native = block_types(engine.manifest.target)
            stored = partial(stored_quant, dtype=dtype, native=native, exact=exact_types(engine.config.build))
            _check_quant(checkpoint, buffer, source, infos, stored)
        else:
            source = Packed(engine.weights[buffer.name])
        specs.append(
            WeightSpec(
                name=buffer.name,
                source=source,
                quant=buffer.quant,
                layout=buffer.layout,
                shape=tuple(d for d in buffer.shape if isinstance(d, int)),
            )
        )
    return specs


def _check_present(
    engine: Engine, sources: WeightSources, checkpoint: Checkpoint, names: Sequence[str]
) -> None:
    """Raise ``CheckpointError`` unless the tensors are there, in the shapes that the engine's had."""
    there = {name: checkpoint.source(name) for name in dict.fromkeys(names)}
    missing = [n for n, recipe in there.items() if any(s not in checkpoint.tensors for s in recipe.sources())]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{checkpoint.name} has no tensor {missing[0]}{more}, which {engine.path} needs; "
            "give a whole checkpoint of the same model, or name what it has (names)"
        )
    for name, recipe in there.items():
        shape = infer_shape(recipe, checkpoint.tensors)
        if shape != sources.shapes.get(name, shape):
            raise CheckpointError(
                f"{checkpoint.name}: {name} is {_dims(shape)}, and {engine.path} was built from "
                f"{_dims(sources.shapes[name])}; rebuild: pelton build {checkpoint.path}"
            )


def _check_quant(
    checkpoint: Checkpoint,
    buffer: Buffer,
    recipe: Recipe,
    infos: Mapping[str, TensorInfo],
    stored_as: Callable[[str, tuple[int, ...]], str],
) -> None:
    """Raise ``CheckpointError`` unless what ``recipe`` gives is stored as ``buffer`` says."""
    try:
        stored = stored_as(infer_quant(recipe, infos), infer_shape(recipe, infos))
    except (AssertionError, CheckpointError):
        stored = "mixed"  # types that the recipe cannot put together, although the first ones could be
    if stored != buffer.quant:
        names = dict.fromkeys(recipe.sources())
        quants = dict.fromkeys(infos[name].quant for name in names)
        raise CheckpointError(
            f"{checkpoint.name} has {', '.join(names)} as {', '.join(quants)}, and the engine's plan stores "
            f"{buffer.quant}; rebuild: pelton build {checkpoint.path}"
        )


def _dims(shape: Sequence[object]) -> str:
    return " x ".join(map(str, shape))


def _resolved(condition: SameValues, checkpoint: Checkpoint) -> SameValues:
    return replace(
        condition,
        a=resolve_sources(condition.a, checkpoint.source),
        b=resolve_sources(condition.b, checkpoint.source),
    )


def _copy_others(old: Engine, folder: Path) -> None:
    for entry in old.manifest.files:
        if not entry.path.endswith(".safetensors"):
            target = folder / entry.path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(old.path / entry.path, target)


def _write_descriptions(
    folder: Path, old: Engine, checkpoint: Checkpoint, sources: WeightSources, *, partial: bool, count: int
) -> None:
    """config.json, weights.json and report.json, which say whose weights these are."""
    name = sources.checkpoint if partial else checkpoint.name
    model = msgspec.structs.replace(old.config.model, name=name)
    write_json(folder / "config.json", msgspec.structs.replace(old.config, model=model))
    write_compact(folder / "weights.json", msgspec.structs.replace(sources, checkpoint=name))
    report = old.report()
    what = f"{count} weights" if partial else "all weights"
    notes = report.get("notes")
    kept = [n for n in notes if "refitted" not in n] if isinstance(notes, list) else []
    # The quality was that of other weights.
    report |= {"quality": None, "notes": [*kept, f"{what} refitted from {checkpoint.name}"]}
    write_json(folder / "report.json", report)
