"""Streams weights from the checkpoint into the engine, some rows at a time.

read (a view of the mapped file) -> recipe -> rows -> element type -> layout -> shard. Nothing is kept: the
peak is what a weight's recipe copies (nothing, where it is one tensor of the file) and a few pieces, whatever
the size of the model or of its largest tensor. Pieces are made in threads, since numpy lets go of the lock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pelton.builder.clock import Progress
from pelton.dtypes import BLOCK_TYPES, is_dense
from pelton.engine.config import BuildConfig
from pelton.engine.shards import ShardWriter, TensorMeta
from pelton.errors import BuildError, ConfigError
from pelton.ir.blocks import dequantize
from pelton.ir.evaluate import evaluate, infer_quant, infer_shape
from pelton.ir.recipe import Recipe, is_row_wise, rows
from pelton.ir.tensors import HostTensor, bf16_to_f32, f32_to_bf16
from pelton.kernels.layouts import LAYOUTS
from pelton.models.checkpoint import assert_finite, count_non_finite
from pelton.quant.repack import EQUAL, FALLBACK, as_equal, repack

#: Values made at a time, so that temporaries stay small.
_CHUNK = 1 << 22
_THREADS = 2

_NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


@dataclass(frozen=True)
class Packed:
    """Bytes as an engine stores them already: a weight that a refit leaves alone."""

    data: npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class WeightSpec:
    """One tensor of the engine: how it is made and stored."""

    name: str
    source: Recipe | npt.NDArray[np.float32] | Packed
    """A recipe over checkpoint tensors, the values of a constant, or what is stored as it is."""
    quant: str
    layout: str
    shape: tuple[int, ...]

    @property
    def blocks(self) -> bool:
        """Whether the values are block-quantised."""
        return not is_dense(self.quant)

    @property
    def meta(self) -> TensorMeta:
        return TensorMeta(
            name=self.name,
            quant=self.quant,
            layout=self.layout,
            shape=self.shape,
            nbytes=LAYOUTS[self.layout].nbytes(self.quant, self.shape),
        )


def stored_quant(
    quant: str, shape: tuple[int, ...], dtype: str, native: Collection[str], *, exact: bool = False
) -> str:
    """Type in which an engine stores a tensor of ``shape`` that the checkpoint holds as ``quant``.

    ``native``: block types that the target's kernels read (``target.block_types``).

    Vectors (norms, biases) are float32: they are small and kernels read them as such. Dense
    matrices take the build's ``dtype``; blocks stay as they are where kernels know them or a type that is
    equal, and else become ``FALLBACK`` or, where kernels do not know that either, dense. ``exact``, of a
    build in float32 all through: they are dense then too, since ``FALLBACK`` would round them. So are, for
    CPUs, blocks of rows that ``FALLBACK``'s do not divide: their kernels read 32 columns at a time.
    """
    if is_dense(quant):
        return dtype if len(shape) > 1 else "float32"
    if FALLBACK in native and shape[-1] % BLOCK_TYPES[FALLBACK].block_size:
        return dtype
    if quant in native:
        return quant
    if EQUAL.get(quant) in native:
        return EQUAL[quant]
    return FALLBACK if FALLBACK in native and not exact else dtype


def exact_types(config: BuildConfig) -> bool:
    """Whether a build is in float32 all through: weights and activations."""
    return config.dtype == config.activations == "float32"


def is_rounded(quant: str, stored: str) -> bool:
    """Whether storing ``quant`` as ``stored`` may lose bits."""
    same = quant == stored or EQUAL.get(quant) == stored
    return not same and not (is_dense(quant) and stored == "float32")


def write_weights(
    folder: Path,
    specs: Iterable[WeightSpec],
    read: Callable[[str], HostTensor],
    progress: Progress,
) -> tuple[list[tuple[Path, int, str]], list[str]]:
    """Write all weights into shards in ``folder``.

    Returns (path, bytes, sha256) of each shard and notes for the report. Raises ``CheckpointError``
    for non-finite values, ``ConfigError`` for values that the chosen dtype cannot hold.
    """
    specs = list(specs)
    metas = [spec.meta for spec in specs]
    total, done = sum(meta.nbytes for meta in metas), 0
    notes: dict[str, list[str]] = {}
    with ShardWriter(folder, metas) as writer, ThreadPoolExecutor(_THREADS) as pool:
        for spec, meta in zip(specs, metas, strict=True):
            pieces, note = pack_weight(spec, read)
            if note:
                notes.setdefault(note, []).append(spec.name)
            layout = LAYOUTS[spec.layout]
            writer.write(spec.name, layout.join(_ahead(pool, pieces), spec.quant, spec.shape))
            done += meta.nbytes
            progress("weights", done, total)
    return writer.files, [_summary(note, names) for note, names in notes.items()]


Bytes = npt.NDArray[np.uint8]


def pack_weight(
    spec: WeightSpec, read: Callable[[str], HostTensor]
) -> tuple[Iterator[Callable[[], Bytes]], str]:
    """Makers of the packed pieces that the layout joins, and a note on what was changed ("": nothing)."""
    if isinstance(spec.source, Packed):
        data = spec.source.data
        return iter([lambda: data]), ""
    layout = LAYOUTS[spec.layout]
    rows_of, note = _rows(spec, read)

    def piece(start: int, stop: int) -> Bytes:
        return layout.pack(_stored(rows_of(start, stop), spec, read))

    return (partial(piece, *bounds) for bounds in _bounds(spec.shape, layout.panel_rows)), note


def _rows(
    spec: WeightSpec, read: Callable[[str], HostTensor]
) -> tuple[Callable[[int, int], HostTensor], str]:
    """What gives rows of the weight as its recipe makes them, only those where it can; and a note."""
    recipe = spec.source
    if isinstance(recipe, Recipe) and len(spec.shape) == 2 and is_row_wise(recipe):
        tensors = {name: read(name) for name in recipe.sources()}
        _check_shape(spec, infer_shape(recipe, tensors))
        quant = infer_quant(recipe, tensors)
        if is_dense(quant) or is_dense(spec.quant) or quant == spec.quant:
            return lambda start, stop: evaluate(rows(recipe, start, stop), tensors.__getitem__), ""
        if EQUAL.get(quant) == spec.quant:
            return lambda start, stop: as_equal(evaluate(rows(recipe, start, stop), tensors.__getitem__)), ""
    tensor, note = unpacked(spec, read)

    def part(start: int, stop: int) -> HostTensor:
        return HostTensor(tensor.quant, (stop - start, *spec.shape[1:]), tensor.data[start:stop])

    return part, note


def unpacked(spec: WeightSpec, read: Callable[[str], HostTensor]) -> tuple[HostTensor, str]:
    """What the weight's recipe gives, block types without native kernels requantised, and a note."""
    if isinstance(spec.source, np.ndarray):
        return HostTensor("float32", spec.shape, np.ascontiguousarray(spec.source, np.float32)), ""
    assert isinstance(spec.source, Recipe)
    tensor = evaluate(spec.source, read)
    _check_shape(spec, tensor.shape)
    if tensor.dense or tensor.quant == spec.quant or is_dense(spec.quant):
        return tensor, ""
    _assert_finite(tensor, spec, read)
    return repack(tensor, spec.quant)


def _check_shape(spec: WeightSpec, shape: tuple[int, ...]) -> None:
    if shape != spec.shape:
        raise BuildError(f"{spec.name} has shape {shape}, and the plan expects {spec.shape}")


def _stored(part: HostTensor, spec: WeightSpec, read: Callable[[str], HostTensor]) -> HostTensor:
    """Some rows in the type that the engine stores."""
    _assert_finite(part, spec, read)
    if not part.dense:
        if not is_dense(spec.quant):
            return part
        part = HostTensor("float32", part.shape, dequantize(part))
    converted = convert(part, spec.quant)
    if converted.quant == "float16" and not np.isfinite(converted.data).all():
        raise ConfigError(f"{spec.name} has values beyond float16's range; use dtype bfloat16 or float32")
    return converted


def _assert_finite(tensor: HostTensor, spec: WeightSpec, read: Callable[[str], HostTensor]) -> None:
    """Raise ``CheckpointError`` for a NaN or infinite value, naming the checkpoint's tensor."""
    if count_non_finite(tensor):
        sources = spec.source.sources() if isinstance(spec.source, Recipe) else ()
        for name in sources:
            assert_finite(read(name), name)
        assert_finite(tensor, spec.name)


def _bounds(shape: tuple[int, ...], panel_rows: int) -> Iterator[tuple[int, int]]:
    """Row ranges of about ``_CHUNK`` values, whole panels each."""
    count = shape[0] if shape else 1
    step = max(1, _CHUNK // max(1, math.prod(shape[1:])) // panel_rows) * panel_rows
    if len(shape) != 2:
        step = count
    for start in range(0, count, step):
        yield start, min(count, start + step)


def _ahead(pool: ThreadPoolExecutor, makers: Iterable[Callable[[], Bytes]]) -> Iterator[Bytes]:
    """What ``makers`` make, in order, a few of them at work while one is taken."""
    working: deque[Future[Bytes]] = deque()
    for make in makers:
        working.append(pool.submit(make))
        if len(working) > _THREADS:
            yield working.popleft().result()
    while working:
        yield working.popleft().result()


def convert(tensor: HostTensor, dtype: str) -> HostTensor:
    """A dense tensor as ``dtype``, rounding to nearest even where it has fewer bits."""
    if tensor.quant == dtype:
        return tensor
    assert dtype in _NUMPY, f"weights are never stored as {dtype}"
    flat = np.ascontiguousarray(tensor.data).reshape(-1)
    out = np.empty(flat.shape, _NUMPY[dtype])
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK]
        wide = bf16_to_f32(part) if tensor.quant == "bfloat16" else part.astype(np.float32)
        with np.errstate(over="ignore"):  # float16's range is checked afterwards
            out[start : start + _CHUNK] = f32_to_bf16(wide) if dtype == "bfloat16" else wide
    return HostTensor(dtype, tensor.shape, out.reshape(tensor.shape))


def _summary(note: str, names: list[str]) -> str:
    if len(names) == 1:
        return f"{names[0]}: {note}"
    return f"{names[0]} and {len(names) - 1} more: {note}"


def stored_bytes(specs: Iterable[WeightSpec]) -> dict[str, int]:
    """Bytes of the engine's weights by stored type."""
    total: dict[str, int] = {}
    for spec in specs:
        total[spec.quant] = total.get(spec.quant, 0) + spec.meta.nbytes
    return total
