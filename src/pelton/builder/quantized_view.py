"""A checkpoint with some of its tensors quantised: what a build, an evaluation or a writer reads."""

from __future__ import annotations

import fnmatch
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from pelton import nn
from pelton.builder.calibration import decoder_layers
from pelton.dtypes import BLOCK_TYPES, ITEMSIZE, is_dense
from pelton.errors import CheckpointError, ConfigError
from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.blocks import dequantize
from pelton.ir.evaluate import evaluate
from pelton.ir.group_encoder import ScaleRangeError
from pelton.ir.kv_quant import KVQuant
from pelton.ir.recipe import AddScalar, Recipe, Source, Transpose, transpose
from pelton.ir.tensors import HostTensor, ValuesNotRead
from pelton.models.checkpoint import Checkpoint, TensorInfo, assert_finite
from pelton.models.registry import ARCHITECTURES, architecture_of, create_model, is_known
from pelton.quant.config import NONE, QuantConfig, describe, smaller_group
from pelton.quant.nf4 import nf4_double
from pelton.quant.nvfp4 import shared_row, stack_of, top_of
from pelton.quant.qserve import progressive_tensor
from pelton.quant.rounding import nearest_values, round_nearest
from pelton.quant.statistics import Float32

#: Rows of a weight that are rounded at a time: whole blocks of all types.
_PART_ROWS = 1024


@dataclass(frozen=True)
class Place:
    """The Hugging Face tensor behind a parameter of a model."""

    tensor: str
    transposed: bool = False
    offset: float = 0.0
    """What the parameter is more than the tensor."""

    @property
    def module(self) -> str:
        """What patterns of a ``QuantConfig`` are held against."""
        return self.tensor.removesuffix(".weight")

    def dense(self, parameter: Float32) -> HostTensor:
        """The tensor that makes the parameter's values, in float32."""
        values = parameter.T if self.transposed else parameter
        values = np.ascontiguousarray(values - np.float32(self.offset) if self.offset else values)
        return HostTensor("float32", values.shape, values)

    def parameter(self, tensor: HostTensor) -> Float32:
        """The parameter's values; blocks are (out, in) already."""
        values = dequantize(tensor)
        if self.transposed and tensor.dense:
            values = np.ascontiguousarray(values.T)
        return values + np.float32(self.offset) if self.offset else values


def places(model: nn.CausalLM) -> dict[str, Place]:
    """Of every parameter by its name. Raises ``CheckpointError`` where it is made of several tensors."""
    found = {}
    for name, recipe in nn.collect_recipes(model).items():
        transposed, offset, base = False, 0.0, recipe
        while isinstance(base, Transpose | AddScalar):
            transposed ^= isinstance(base, Transpose)
            offset += base.value if isinstance(base, AddScalar) else 0.0
            base = base.base
        if not isinstance(base, Source):
            raise CheckpointError(
                f"{name} of {type(model).__name__} is made of several tensors, so it cannot be quantised"
            )
        found[name] = Place(base.name, transposed, offset)
    return found


def draft(checkpoint: Checkpoint, max_seq_len: int = 2) -> nn.CausalLM:
    """The checkpoint's model on the meta device. Raises ``CheckpointError`` where it has no file here."""
    name = architecture_of(checkpoint.config)
    if not is_known(name):
        raise CheckpointError(
            f"{name} has no file of its own in Pelton, so {checkpoint.name} cannot be quantised (those that "
            f"have: {', '.join(sorted(ARCHITECTURES))})"
        )
    return create_model(checkpoint.config, max_seq_len=max_seq_len, impl="pelton")


class QuantizedCheckpoint(Checkpoint):
    """``base`` with the tensors ``changed``, read by ``read``; blocks are stored (out, in).

    ``activations``: of the linear layer of a tensor. ``transposed``: tensors that Hugging Face has (in, out).
    """

    def __init__(
        self,
        base: Checkpoint,
        config: QuantConfig,
        changed: Mapping[str, TensorInfo],
        read: Callable[[str], HostTensor],
        *,
        transposed: Iterable[str] = (),
        activations: Mapping[str, ActivationQuant] | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.base, self.quant_config, self.changed = base, config, changed
        self.name, self.path = base.name, base.path
        self.config, self.generation_config = base.config, base.generation_config
        self.tensors = {**base.tensors, **changed}
        self.zero_biases = base.zero_biases
        self._notes = notes
        self._read = read
        self._transposed = frozenset(transposed)
        self._activations = dict(activations or {})

    def read(self, name: str) -> HostTensor:
        return self._read(name) if name in self.changed else self.base.read(name)

    def source(self, name: str) -> Recipe:
        if name not in self.changed:
            return self.base.source(name)
        return Transpose(Source(name)) if name in self._transposed else Source(name)

    def activation_quant(self, name: str) -> ActivationQuant | None:
        return self._activations.get(name) if name in self.changed else self.base.activation_quant(name)

    def kv_quant(self) -> KVQuant | None:
        kv, own = self.quant_config.kv, self.base.kv_quant()
        if kv is None and own is not None and self.quant_config.scaling != "none":
            # Factors went into the rows that make values: the checkpoint's scales are of other ones.
            return KVQuant(own.dtype)
        return own if kv is None else KVQuant(kv)

    def read_notes(self) -> list[str]:
        count = sum(not is_dense(info.quant) for info in self.changed.values())
        what = f"{count} tensors are quantised: {describe(self.quant_config)}"
        return [*self.base.read_notes(), what, *self._notes]

    def write_tokenizer(self, directory: Path) -> None:
        self.base.write_tokenizer(directory)

    def files(self) -> Iterable[Path]:
        return self.base.files()

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(self.base.fingerprint().encode(), digest_size=16)
        digest.update(msgspec.json.encode(self.quant_config, order="sorted"))
        return digest.hexdigest()


def tensor_info(name: str, quant: str, shape: tuple[int, ...]) -> TensorInfo:
    """Of a tensor as a quantised checkpoint holds it."""
    if is_dense(quant):
        nbytes = ITEMSIZE[quant] * math.prod(shape)
    else:
        nbytes = shape[0] * BLOCK_TYPES[quant].row_bytes(shape[1])
    return TensorInfo(name=name, shape=shape, quant=quant, nbytes=nbytes)


@dataclass(frozen=True)
class Target:
    """A weight that is to be quantised."""

    place: Place
    quant: str
    shape: tuple[int, int]
    """(out, in)."""


def targets(model: nn.CausalLM, config: QuantConfig) -> tuple[dict[str, Target], tuple[str, ...]]:
    """By parameter name, what ``config`` quantises in a model; and sentences on groups that do not fit."""
    where = places(model)
    prefix = decoder_layers(model)[0] + "."
    first_names = {id(value): name for name, value in model.named_parameters()}
    found: dict[str, Target] = {}
    notes: dict[str, list[str]] = {}
    modules = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding):
            continue
        # A tied head is the embedding's tensor, and goes by both names.
        parameter = first_names[id(module.weight)]
        place = where[parameter]
        own = place.module if parameter == f"{name}.weight" else name
        modules.append(own)
        wanted = config.type_of(own, outside=not name.startswith(prefix))
        if wanted == NONE or parameter in found:
            continue
        if name.startswith(prefix):
            config.check_inputs(own, wanted)
        rows, columns = module.weight.shape
        quant = smaller_group(wanted, columns)
        if quant != wanted:
            became = "left as they are" if quant == NONE else quant
            notes.setdefault(f"{wanted} does not divide {columns} columns: {became}", []).append(own)
        if quant != NONE:
            found[parameter] = Target(place, quant, (rows, columns))
    sentences = tuple(
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {why}"
        for why, names in notes.items()
    )
    for pattern in (*config.modules, *config.ignore, *config.overrides):
        if not fnmatch.filter(modules, pattern):
            raise ConfigError(
                f"the pattern {pattern!r} fits no module of {type(model).__name__}; they are named like "
                f"{modules[len(modules) // 2]}"
            )
    first = {next((p for p in config.overrides if fnmatch.fnmatchcase(m, p)), None) for m in modules}
    for pattern in config.overrides:
        if pattern not in first:
            raise ConfigError(
                f"the override {pattern!r} changes nothing: those before it fit all of its modules; put it "
                "first"
            )
    if not found:
        raise ConfigError(
            f"the recipe quantises no module of {type(model).__name__}: "
            f"{'; '.join(sentences) or 'its patterns leave none'}"
        )
    return found, sentences


@contextmanager
def naming(tensor: str) -> Iterator[None]:
    """Raise ``CheckpointError`` with the tensor's name for values that a type's scales cannot span."""
    try:
        yield
    except ScaleRangeError as error:
        raise CheckpointError(
            f"{tensor} cannot be quantised: {error}; is the checkpoint damaged? Leave its module as it is "
            "(ignore), or give it a type with float32 scales (overrides: int8_row)"
        ) from error


def plain_weight(weight: Float32, quant: str, config: QuantConfig, row: Float32 | None = None) -> HostTensor:
    """``weight`` rounded to nearest as ``config`` says, without any statistics. ``row``: nvfp4's header."""
    if config.double_quantization and quant == "nf4_g64":
        return nf4_double(weight)
    if config.progressive and quant.startswith("int4_g"):
        return progressive_tensor(weight, quant)
    per_tensor = config.per_tensor and quant.endswith("_row")
    return round_nearest(weight, quant, symmetric=config.symmetric, per_tensor=per_tensor, row=row)


def plain_values(weight: Float32, quant: str, config: QuantConfig) -> Float32:
    """The values that ``plain_weight`` stores."""
    if (config.double_quantization and quant == "nf4_g64") or (
        config.progressive and quant.startswith("int4_g")
    ):
        return dequantize(plain_weight(weight, quant, config))
    per_tensor = config.per_tensor and quant.endswith("_row")
    return nearest_values(weight, quant, symmetric=config.symmetric, per_tensor=per_tensor)


def row_parts(weight: Float32, quant: str, config: QuantConfig) -> list[Float32]:
    """``weight`` in pieces of rows that ``plain_values`` rounds as it rounds the whole."""
    whole = quant == "nvfp4" or config.double_quantization or (config.per_tensor and quant.endswith("_row"))
    step = len(weight) if whole else _PART_ROWS
    return [weight[i : i + step] for i in range(0, len(weight), step)]


def float_weight(checkpoint: Checkpoint, place: Place) -> Float32:
    """A weight's values (out, in), dequantised. Raises ``CheckpointError`` for values that are not finite."""
    recipe = checkpoint.source(place.tensor)
    tensor = evaluate(transpose(recipe) if place.transposed else recipe, checkpoint.read)
    assert_finite(tensor, place.tensor)
    return dequantize(tensor)


def round_in_stream(base: Checkpoint, config: QuantConfig) -> QuantizedCheckpoint:
    """``base`` as a recipe without calibration makes it: each weight is rounded when it is read."""
    config.check()
    assert not config.calibrated

    def read(target: Target, stack: Sequence[Target]) -> HostTensor:
        # Of nvfp4: one after another, before this one's.
        tops = [top_of(float_weight(base, t.place)) for t in stack if t.quant == target.quant == "nvfp4"]
        weight = float_weight(base, target.place)
        row = shared_row(tops, len(weight)) if tops else None
        with naming(target.place.tensor):
            return plain_weight(weight, target.quant, config, row)

    return _view(base, config, read)


def planned(base: Checkpoint, config: QuantConfig) -> QuantizedCheckpoint:
    """``base`` with the types that a recipe gives its weights, and no values: for dry runs."""

    def read(target: Target, stack: Sequence[Target]) -> HostTensor:
        raise ValuesNotRead(target.place.tensor)

    config.check()
    return _view(base, config, read)


def _view(
    base: Checkpoint, config: QuantConfig, read: Callable[[Target, Sequence[Target]], HostTensor]
) -> QuantizedCheckpoint:
    """``read``: a target's codes, given those that engines stack it with, itself among them."""
    model = draft(base)
    found, notes = targets(model, config)
    by_tensor = {target.place.tensor: target for target in found.values()}
    stacks: dict[str, list[Target]] = {}
    for target in found.values():
        stacks.setdefault(stack_of(target.place.module), []).append(target)
    a, inside = config.activations, decoder_layers(model)[0] + "."
    layers = [target for name, target in found.items() if name.startswith(inside)]
    return QuantizedCheckpoint(
        base,
        config,
        {name: tensor_info(name, t.quant, t.shape) for name, t in by_tensor.items()},
        lambda name: read(by_tensor[name], stacks[stack_of(by_tensor[name].place.module)]),
        transposed=[name for name, t in by_tensor.items() if t.place.transposed],
        activations={t.place.tensor: a.of_columns(t.shape[1]) for t in layers} if a else None,
        notes=notes,
    )
