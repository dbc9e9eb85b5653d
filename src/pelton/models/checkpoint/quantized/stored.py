"""The tensors of a folder as its files hold them, checked before they are interpreted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pelton.errors import CheckpointError
from pelton.ir.group_blocks import E4M3
from pelton.ir.tensors import bf16_to_f32
from pelton.models.checkpoint.safetensors_file import SafetensorsEntry, SafetensorsFile

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]

#: What ``array`` gives: bfloat16 and the fp8 types as bit patterns.
_NUMPY: dict[str, Any] = {
    "bfloat16": np.uint16,
    "float8_e4m3": np.uint8,
    "float8_e5m2": np.uint8,
    "float8_e8m0": np.uint8,
    "bool": np.uint8,
}
FLOATS = ("float32", "float16", "bfloat16")
SCALES = (*FLOATS, "float8_e8m0")


class StoredTensors:
    """Tensors by the names that files give them; ``where`` names the checkpoint in messages."""

    def __init__(self, where: str, files: Mapping[str, tuple[SafetensorsFile, str]]) -> None:
        self.where = where
        self._files = files

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def entry(self, name: str) -> SafetensorsEntry:
        """Type, shape and size of a tensor that exists."""
        file, stored = self._files[name]
        return file.tensors[stored]

    def array(self, name: str) -> Array:
        """A read-only view of the mapped file, aligned."""
        file, stored = self._files[name]
        entry = file.tensors[stored]
        raw = file.bytes_of(stored).view(_NUMPY.get(entry.type, entry.type))
        return np.require(raw.reshape(entry.shape), requirements="A")

    def floats(self, name: str) -> Float32:
        """A float tensor's values as float32, exactly."""
        values, kind = self.array(name), self.entry(name).type
        if kind == "bfloat16":
            return bf16_to_f32(values)
        if kind == "float8_e4m3":
            return E4M3[values]
        if kind == "float8_e8m0":
            return np.exp2(np.where(values == 255, np.nan, values - np.float32(127))).astype(np.float32)
        return values.astype(np.float32)

    def need(
        self, name: str, types: tuple[str, ...], shape: tuple[int, ...] | None = None
    ) -> SafetensorsEntry:
        """The entry of ``name``. Raises ``CheckpointError`` unless it is there, of one of ``types`` and of
        ``shape`` (None: a matrix of any size)."""
        if name not in self._files:
            raise self.wrong(f"has no tensor {name}, which its quantised weight needs")
        entry = self.entry(name)
        if entry.type not in types:
            raise self.wrong(f"has {name} as {entry.type}, not {' or '.join(types)}")
        fits = len(entry.shape) == 2 if shape is None else entry.shape == shape
        if not fits:
            raise self.wrong(f"has {name} of shape {dims(entry.shape)}, not {dims(shape or ())}")
        return entry

    def need_scalar(self, name: str) -> float:
        """The value of a float tensor of one element."""
        if name not in self._files:
            raise self.wrong(f"has no tensor {name}, which its quantised weight needs")
        entry = self.entry(name)
        if entry.type not in SCALES or np.prod(entry.shape, dtype=int) != 1:
            raise self.wrong(f"has {name} as {dims(entry.shape)} of {entry.type}, not one float")
        return float(self.floats(name).reshape(()))

    def wrong(self, what: str) -> CheckpointError:
        """The error for what does not fit."""
        return CheckpointError(
            f"{self.where} {what}; it is damaged, or its quantization_config describes another checkpoint"
        )


def dims(shape: tuple[int, ...]) -> str:
    """``2 x 3``."""
    return " x ".join(map(str, shape)) or "a matrix"
