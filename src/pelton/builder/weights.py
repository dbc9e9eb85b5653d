"""Streams weights from the checkpoint into the engine, one at a time.

read (a view of the mapped file) -> recipe -> element type -> layout -> shard. Nothing is kept, so
the peak is one weight and its packed copy, whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pelton.builder.clock import Progress
from pelton.dtypes import NATIVE_BLOCK_TYPES, is_dense
from pelton.engine.shards import ShardWriter, TensorMeta
from pelton.errors import BuildError, ConfigError
from pelton.ir.evaluate import evaluate
from pelton.ir.recipe import Recipe
from pelton.ir.tensors import HostTensor, bf16_to_f32, f32_to_bf16
from pelton.kernels.layouts import LAYOUTS
from pelton.models.checkpoint import assert_finite
from pelton.quant.repack import repack

#: Values converted at a time, so that temporaries stay small.
_CHUNK = 1 << 22

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


def stored_quant(quant: str, ndim: int, dtype: str) -> str:
    """Type in which an engine stores a tensor that the checkpoint holds as ``quant``.

    Vectors (norms, biases) are float32: they are small and kernels read them as such. Dense
    matrices take the build's ``dtype``; blocks stay as they are where kernels know them.
    """
    if is_dense(quant):
        return dtype if ndim > 1 else "float32"
    return quant if quant in NATIVE_BLOCK_TYPES else "q8_0"


def is_rounded(quant: str, stored: str) -> bool:
    """Whether storing ``quant`` as ``stored`` may lose bits."""
    return quant != stored and not (is_dense(quant) and stored == "float32")


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
    with ShardWriter(folder, metas) as writer:
        for spec, meta in zip(specs, metas, strict=True):
            data, note = pack_weight(spec, read)
            if note:
                notes.setdefault(note, []).append(spec.name)
            writer.write(spec.name, data)
            del data
            done += meta.nbytes
            progress("weights", done, total)
    return writer.files, [_summary(note, names) for note, names in notes.items()]


def pack_weight(spec: WeightSpec, read: Callable[[str], HostTensor]) -> tuple[npt.NDArray[np.uint8], str]:
    """The weight's bytes as the engine stores them, and ``materialise``'s note."""
    if isinstance(spec.source, Packed):
        return spec.source.data, ""
    tensor, note = materialise(spec, read)
    return LAYOUTS[spec.layout].pack(tensor), note


def materialise(spec: WeightSpec, read: Callable[[str], HostTensor]) -> tuple[HostTensor, str]:
    """The tensor in its stored type, unpacked, and a note on what was changed ("" if nothing)."""
    if isinstance(spec.source, np.ndarray):
        return HostTensor("float32", spec.shape, np.ascontiguousarray(spec.source, np.float32)), ""
    assert isinstance(spec.source, Recipe)
    tensor = evaluate(spec.source, read)
    for name in spec.source.sources():
        assert_finite(read(name), name)
    if tensor.shape != spec.shape:
        raise BuildError(f"{spec.name} has shape {tensor.shape}, and the plan expects {spec.shape}")
    if tensor.dense:
        converted = convert(tensor, spec.quant)
        if converted.quant == "float16" and not np.isfinite(converted.data).all():
            raise ConfigError(f"{spec.name} has values beyond float16's range; use dtype bfloat16 or float32")
        return converted, ""
    repacked, note = repack(tensor)
    assert repacked.quant == spec.quant, f"{spec.name}: {repacked.quant} instead of {spec.quant}"
    return repacked, note


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
