"""The safetensors container, memory-mapped: an 8-byte length, a JSON index, then the bytes.

Parsed here because the library's numpy interface has no bfloat16 and its torch interface loads
torch; the format is smaller than either.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pelton.errors import CheckpointError
from pelton.models.checkpoint.mapped_file import map_file

#: safetensors' type names: ours and bytes per value.
_TYPES = {
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F64": ("float64", 8),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
    "F8_E4M3": ("float8_e4m3", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0", 1),
}
#: The format's own limit on the length of the index.
_MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class SafetensorsEntry:
    """One tensor of the index; ``offset`` counts from the file's start."""

    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile:
    """A parsed ``.safetensors`` file: ``tensors`` by name, ``bytes_of`` for the data.

    Raises ``CheckpointError`` for anything that is not a whole safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = map_file(path)
        if self._map[:40].startswith(b"version https://git-lfs"):
            raise CheckpointError(f"{path} is a Git LFS pointer, not the weights: run git lfs pull")
        length = int.from_bytes(self._map[:8], "little")
        if len(self._map) < 8 or (length <= _MAX_HEADER and 8 + length > len(self._map)):
            raise self._truncated("its header")
        if length > _MAX_HEADER:
            raise self._damaged(f"its header claims {length} bytes")
        try:
            header = json.loads(bytes(self._map[8 : 8 + length]))
        except (ValueError, RecursionError) as error:
            raise self._damaged("its header is not JSON") from error
        if not isinstance(header, dict):
            raise self._damaged("its header is not a JSON object")
        header.pop("__metadata__", None)
        self.tensors = {name: self._entry(name, entry, 8 + length) for name, entry in header.items()}

    def bytes_of(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, a read-only view of the mapped file."""
        entry = self.tensors[name]
        return np.frombuffer(self._map, np.uint8, entry.nbytes, entry.offset)

    def _entry(self, name: str, entry: Any, start: int) -> SafetensorsEntry:
        try:
            type_code = str(entry["dtype"])
            shape = tuple(int(size) for size in entry["shape"])
            begin, end = (int(offset) for offset in entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged(f"its entry for tensor {name} is malformed") from error
        type_name, itemsize = _TYPES.get(type_code, (type_code.lower(), 0))
        if min(shape, default=1) < 1 or begin < 0 or end < begin:
            raise self._damaged(f"its entry for tensor {name} is malformed")
        if start + end > len(self._map):
            raise self._truncated(f"tensor {name}")
        if itemsize and math.prod(shape) * itemsize != end - begin:
            raise self._damaged(
                f"tensor {name} has {end - begin} bytes, not the "
                f"{math.prod(shape) * itemsize} of its shape and type"
            )
        return SafetensorsEntry(type_name, shape, start + begin, end - begin)

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged or not a safetensors file: {why}")

    def _truncated(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is truncated: {what} extends beyond the file's {len(self._map)} bytes; "
            f"download it again"
        )
