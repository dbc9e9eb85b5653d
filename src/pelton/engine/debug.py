"""Two runs of the same steps, tensor by tensor: where they part, and by how much.

A *probe* is one side: it computes a step and gives every named tensor of it. Tensors of equal names and
shapes are compared by their normalised error, ``|a - b| / |b|`` (2-norms). An error that is merely passed on
is not a departure: an instruction departs when its error is beyond ``AMPLIFICATION`` times the largest of its
inputs' plus the bound of its precision. Against the reference runner there is a sharper test: each
instruction is also computed by its op's reference on the engine's own inputs, which leaves its own error
alone (``own``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pelton.engine.batch import InputBatch
from pelton.engine.cost import precisions
from pelton.engine.kv_cache import KVCaches, allocate
from pelton.engine.layers import instruction_layers
from pelton.engine.plan import Instruction, Plan
from pelton.engine.session import Session
from pelton.errors import MissingDependencyError

Array = npt.NDArray[Any]

#: Largest error that one instruction may add, by its precision: as in the conformance of ops, some of which
#: stand for several and round less often than their references.
BOUNDS = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 1e-2, "int8": 4e-2, "fp8": 1e-1}
#: How much an instruction may enlarge the error of its inputs: sums may cancel, products may sharpen.
AMPLIFICATION = 4.0

_HALVES = ("bfloat16", "float16")


class Probe(Protocol):
    """One side of a comparison."""

    name: str

    def step(self, batch: InputBatch) -> dict[str, Array]:
        """Compute ``batch``; every tensor of it by name, and the caches as ``k_cache.LAYER``."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class TensorError:
    """A tensor of a step that both sides have."""

    step: int
    instruction: int
    """What makes it, by index into the plan."""
    name: str
    error: float
    """Normalised; infinite where one side alone is not finite."""
    inherited: float
    """Largest error of the tensors it is made from."""
    bound: float
    """Of the instruction alone, by its precision."""
    own: float | None = None
    """Error of the instruction alone, where it was computed from the engine's own inputs."""

    @property
    def departs(self) -> bool:
        """Written so that NaN departs."""
        if self.own is not None:
            return not self.own <= self.bound
        return not self.error <= AMPLIFICATION * self.inherited + self.bound


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Every tensor compared, in the order of steps and instructions."""

    errors: list[TensorError]
    missing: list[str]
    """Tensors of the engine without a counterpart of the same name and shape."""
    extra: int
    """Tensors that only the other side has."""
    tokens: list[int] = field(default_factory=list)
    """The tokens that were computed."""

    @property
    def first(self) -> TensorError | None:
        """The first departure."""
        return next((e for e in self.errors if e.departs), None)


class SessionProbe:
    """A session as a probe. Its caches are zeroed, so that unwritten slots compare equal."""

    def __init__(self, session: Session, name: str) -> None:
        self.name = name
        self.session = session
        plan = session.engine.plan
        self._names = [plan.operands[o].name for i in plan.instructions for o in i.outputs]
        self._logits = plan.operands[plan.logits].name
        session.zero_kv_caches()

    @property
    def caches(self) -> KVCaches:
        """As they are now."""
        return self.session.kv_caches

    def step(self, batch: InputBatch) -> dict[str, Array]:
        result = self.session.run(batch, self._names)
        taken = {name: as_values(array) for name, array in result.outputs.items()}
        taken[self._logits] = result.logits_NV.copy()
        return taken | cache_tensors(self.caches)

    def close(self) -> None:
        self.session.close()


class OwnErrors:
    """The error of each instruction alone: its op's reference on what the engine itself had as inputs.

    A reference runner whose every result is replaced by the engine's before the next instruction reads it.
    Needs torch."""

    def __init__(self, session: Session, kv_blocks: tuple[int, ...]) -> None:
        try:
            from pelton.engine.reference_runner import ReferenceRunner
        except ImportError as error:  # pragma: no cover - torch is in every development environment
            raise MissingDependencyError(f"comparing with the reference needs PyTorch ({error})") from error
        self._plan = session.engine.plan
        self._caches = allocate(session.config, kv_blocks)
        _zero(self._caches)
        self._runner = ReferenceRunner(self._plan, session.engine.weights, self._caches, session.threads)
        self._runner.observe = self._observe
        self._engine: Mapping[str, Array] = {}
        self._engine_caches: KVCaches | None = None
        self._found: dict[str, float] = {}

    def step(self, batch: InputBatch, engine: Mapping[str, Array], caches: KVCaches) -> dict[str, float]:
        """Errors by tensor of a step whose tensors on the engine are ``engine``."""
        self._engine, self._engine_caches, self._found = engine, caches, {}
        self._runner.run(batch, ())
        return self._found

    def _observe(self, position: int, views: list[Any]) -> None:
        instruction = self._plan.instructions[position]
        for index, view in zip(instruction.outputs, views, strict=True):
            name = self._plan.operands[index].name
            theirs = self._engine[name]
            if theirs.dtype == np.float32:
                self._found[name] = normalised_error(theirs, view.float().numpy())
            view.copy_(view.new_tensor(theirs))
        for name, layer, kind in written_caches(self._plan, instruction):
            mine = getattr(self._caches, kind)[layer]
            theirs_cache = getattr(self._engine_caches, kind)[layer]
            self._found[name] = normalised_error(as_values(theirs_cache), as_values(mine))
            mine[...] = theirs_cache


def compare(
    plan: Plan,
    engine: Probe,
    other: Probe,
    batches: Sequence[InputBatch],
    own: OwnErrors | None = None,
) -> Comparison:
    """Run ``batches`` on both. ``plan`` is the engine's; with ``own``, ``engine`` is a ``SessionProbe``."""
    errors: list[TensorError] = []
    missing: dict[str, None] = {}
    extra: set[str] = set()
    for number, batch in enumerate(batches):
        left, right = engine.step(batch), other.step(batch)
        alone: Mapping[str, float] = {}
        if own is not None:
            assert isinstance(engine, SessionProbe)
            alone = own.step(batch, left, engine.caches)
        errors += _step_errors(plan, number, left, right, alone, missing)
        extra |= right.keys() - left.keys()
    tokens = [int(t) for batch in batches for t in batch.input_ids_T]
    return Comparison(errors=errors, missing=list(missing), extra=len(extra), tokens=tokens)


def _step_errors(
    plan: Plan,
    number: int,
    left: Mapping[str, Array],
    right: Mapping[str, Array],
    own: Mapping[str, float],
    missing: dict[str, None],
) -> list[TensorError]:
    found = []
    by_buffer: dict[int, float] = {}  # error of what a buffer holds, or inherited where it is unknown
    for index, instruction in enumerate(plan.instructions):
        sources = [plan.operands[i].buffer for i in instruction.inputs if i >= 0]
        inherited = max((by_buffer.get(b, 0.0) for b in sources), default=0.0)
        made = [(plan.operands[o].name, plan.operands[o].buffer) for o in instruction.outputs]
        made += [
            (name, _cache_buffer(plan, instruction, name)) for name, _, _ in written_caches(plan, instruction)
        ]
        for name, buffer in made:
            a, b = left.get(name), right.get(name)
            # Where the error is not known, what it may be. Packed int8 and fp8 are not compared: they show in
            # the next instruction.
            packed = plan.buffers[buffer].dtype in ("uint8", "float8_e4m3fn")
            bound = BOUNDS["int8"] if packed else instruction_bound(plan, instruction)
            by_buffer[buffer] = max(inherited, bound / AMPLIFICATION)
            if a is None or b is None or a.shape != b.shape:
                missing[name] = None
                continue
            if packed:
                continue
            error = normalised_error(a, b)
            by_buffer[buffer] = max(error, 0.0)
            found.append(
                TensorError(
                    step=number,
                    instruction=index,
                    name=name,
                    error=error,
                    inherited=inherited,
                    bound=bound,
                    own=own.get(name),
                )
            )
    return found


def instruction_bound(plan: Plan, instruction: Instruction) -> float:
    """The largest error that ``instruction`` may have by itself."""
    # A GPU's kernel computes in the type of its operands, whatever the lowest that it is for.
    names = [c.tactic for c in instruction.tactics if not c.tactic.startswith("cuda.")]
    own = {precisions().get(name, "float32") for name in names}
    if "int8" in own:
        return BOUNDS["int8"]
    dtypes = {
        plan.buffers[plan.operands[i].buffer].dtype
        for i in (*instruction.inputs, *instruction.outputs)
        if i >= 0
    }
    return BOUNDS[next((half for half in _HALVES if half in dtypes | own), "float32")]


def written_caches(plan: Plan, instruction: Instruction) -> list[tuple[str, int, str]]:
    """(name, layer, k or v) of the caches that ``instruction`` writes: those it has with a slot mapping."""
    buffers = [plan.buffers[plan.operands[i].buffer] for i in instruction.inputs if i >= 0]
    if not any(b.name.startswith("slot_mapping") for b in buffers):
        return []
    return [(b.name, b.layer, b.kind[0]) for b in buffers if b.kind in ("k_cache", "v_cache")]


def _cache_buffer(plan: Plan, instruction: Instruction, name: str) -> int:
    return next(
        plan.operands[i].buffer
        for i in instruction.inputs
        if i >= 0 and plan.buffers[plan.operands[i].buffer].name == name
    )


def cache_tensors(caches: KVCaches) -> dict[str, Array]:
    """Copies of all caches as float32, by the names that plans give them."""
    return {
        f"{kind}_cache.{layer}": as_values(array)
        for kind in ("k", "v")
        for layer, array in getattr(caches, kind).items()
    }


def as_values(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy, floats as float32. uint16 is taken for bfloat16's bits (numpy has none), and packed bytes
    (uint8) stay what they are: they are not compared."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32) if array.dtype.kind == "f" else array.copy()


def normalised_error(a: Array, b: Array) -> float:
    """``|a - b| / |b|``; infinite where exactly one side is not finite."""
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return float("inf")
    a, b = np.nan_to_num(a.astype(np.float64)), np.nan_to_num(b.astype(np.float64))
    size, difference = float(np.linalg.norm(b)), float(np.linalg.norm(a - b))
    if not difference:
        return 0.0
    return difference / size if size else float("inf")


def _zero(caches: KVCaches) -> None:
    for array in (*caches.k.values(), *caches.v.values()):
        array.fill(0)


def layer_table(plan: Plan, found: Comparison) -> list[tuple[int | None, TensorError, float | None]]:
    """By layer in order: the tensor with the largest error of any step, and the largest own error."""
    layers = instruction_layers(plan)
    worst: dict[int | None, TensorError] = {}
    own: dict[int | None, float | None] = {}
    for e in found.errors:
        layer = layers[e.instruction]
        if layer not in worst or e.error > worst[layer].error:
            worst[layer] = e
        own.setdefault(layer, None)
        if e.own is not None:
            own[layer] = max(own[layer] or 0.0, e.own)
    return [(layer, e, own[layer]) for layer, e in worst.items()]
