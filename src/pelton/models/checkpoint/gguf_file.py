"""GGUF's container: header, metadata and tensor index of a memory-mapped file.

Parsed here rather than by the ``gguf`` library's reader, which builds several numpy arrays per
metadata element: 24 s for a vocabulary of 262,144 against 0.4 s, and a truncated file raises
whatever numpy raises. Format: ggml's ``docs/gguf.md``, version 2 and 3, little endian.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pelton.dtypes import GGUF_BLOCK_TYPES, ITEMSIZE
from pelton.errors import CheckpointError, MissingDependencyError
from pelton.models.checkpoint.mapped_file import map_file

#: GGUF value types with a fixed size: struct codes. 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

#: ggml type numbers of the types that Pelton reads without the gguf library.
_TYPE_NAMES = {
    0: "float32",
    1: "float16",
    2: "q4_0",
    3: "q4_1",
    6: "q5_0",
    7: "q5_1",
    8: "q8_0",
    10: "q2_k",
    11: "q3_k",
    12: "q4_k",
    13: "q5_k",
    14: "q6_k",
    24: "int8",
    26: "int32",
    27: "int64",
    30: "bfloat16",
}


@dataclass(frozen=True)
class GGUFTensor:
    """One entry of the tensor index. ``shape`` is row-major: (rows, cols)."""

    name: str
    type: str
    """Pelton's dtype or block type, or the lower-case name of another ggml type."""
    type_number: int
    shape: tuple[int, ...]
    offset: int
    """From the file's start."""
    nbytes: int


class GGUFFile:
    """A parsed GGUF file: ``metadata`` by key, ``tensors`` by name, ``bytes_of`` for the data.

    Raises ``CheckpointError`` for anything that is not a whole, readable GGUF file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = map_file(path)
        self._at = 0
        try:
            self._parse()
        except (struct.error, IndexError) as error:
            raise self._truncated("its header") from error
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} is damaged: a name in its header is not UTF-8") from error

    def bytes_of(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, a read-only view of the mapped file."""
        return np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.offset)

    # --- parsing ----------------------------------------------------------------------------------

    def _parse(self) -> None:
        magic = bytes(self._map[:4])
        if magic != b"GGUF":
            if len(magic) < 4 and b"GGUF".startswith(magic):
                raise self._truncated("its header")
            raise CheckpointError(f"{self.path} is not a GGUF file: it starts with {magic!r}, not b'GGUF'")
        self._at = 4
        version = self._scalar("I")
        if version & 0xFFFF == 0:
            raise CheckpointError(
                f"{self.path} is a big-endian GGUF file, which Pelton does not read; "
                f"convert it again for a little-endian machine"
            )
        if version not in (2, 3):
            raise CheckpointError(f"{self.path} is GGUF version {version}; Pelton reads versions 2 and 3")
        self.version = version
        tensor_count, entry_count = self._scalar("Q"), self._scalar("Q")
        # An entry takes at least 13 bytes, a tensor 24: larger counts are not worth looping over.
        if entry_count * 13 + tensor_count * 24 > len(self._map):
            raise self._truncated(f"{tensor_count} tensors and {entry_count} metadata entries")
        self.metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"), key)
        entries = [self._tensor_entry() for _ in range(tensor_count)]
        self._index(entries)

    def _index(self, entries: list[tuple[str, tuple[int, ...], int, int]]) -> None:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(f"{self.path} is damaged: alignment {alignment!r} is not a power of two")
        data_start = -(-self._at // alignment) * alignment
        self.tensors: dict[str, GGUFTensor] = {}
        for name, shape, number, offset in entries:
            if name in self.tensors:
                raise CheckpointError(f"{self.path} is damaged: tensor {name} occurs twice")
            type_name, block_size, block_bytes = self._type(number, name)
            if shape[-1] % block_size:
                raise CheckpointError(
                    f"{self.path} is damaged: tensor {name} has rows of {shape[-1]} values, "
                    f"no multiple of {type_name}'s block of {block_size}"
                )
            nbytes = math.prod(shape) // block_size * block_bytes
            start = data_start + offset
            if offset % alignment:
                raise CheckpointError(f"{self.path} is damaged: tensor {name} is not aligned to {alignment}")
            if start + nbytes > len(self._map):
                raise self._truncated(f"tensor {name}")
            self.tensors[name] = GGUFTensor(name, type_name, number, shape, start, nbytes)

    def _type(self, number: int, tensor: str) -> tuple[str, int, int]:
        """(name, block size, bytes per block) of a ggml type number."""
        if number in _TYPE_NAMES:
            name = _TYPE_NAMES[number]
            if name in GGUF_BLOCK_TYPES:
                return name, GGUF_BLOCK_TYPES[name].block_size, GGUF_BLOCK_TYPES[name].block_bytes
            return name, 1, ITEMSIZE[name]
        try:
            from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        except ImportError as error:
            raise MissingDependencyError(
                f"tensor {tensor} of {self.path} has ggml type {number}, which needs the gguf library: "
                f"pip install 'pelton[build]'"
            ) from error
        try:
            kind = GGMLQuantizationType(number)
        except ValueError as error:
            raise CheckpointError(
                f"tensor {tensor} of {self.path} has ggml type {number}, which is unknown; "
                f"the file is damaged or newer than the installed gguf library"
            ) from error
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        return kind.name.lower(), block_size, block_bytes

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        ndim = self._scalar("I")
        if not 1 <= ndim <= 4:
            raise CheckpointError(f"{self.path} is damaged: tensor {name} has {ndim} dimensions")
        dims = struct.unpack_from(f"<{ndim}Q", self._map, self._at)
        if 0 in dims:
            raise CheckpointError(f"{self.path} is damaged: tensor {name} has an empty dimension")
        self._at += 8 * ndim
        return name, tuple(reversed(dims)), self._scalar("I"), self._scalar("Q")

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._map, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        end = self._at + length
        if end > len(self._map):
            raise IndexError("string beyond the file's end")
        text = self._map[self._at : end].decode()
        self._at = end
        return text

    def _value(self, kind: int, key: str) -> Any:
        if kind == 6:
            return _shortest(self._scalar("f"))
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(key)
        raise CheckpointError(f"{self.path} is damaged: metadata {key} has unknown value type {kind}")

    def _array(self, key: str) -> list[Any]:
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind in _SCALARS:
            code = _SCALARS[kind]
            nbytes = struct.calcsize("<" + code) * count
            if self._at + nbytes > len(self._map):
                raise IndexError("array beyond the file's end")
            values = np.frombuffer(self._map, np.dtype("<" + code if code != "?" else "?"), count, self._at)
            self._at += nbytes
            return list(values.tolist())
        if count * 8 > len(self._map):
            raise IndexError("array beyond the file's end")
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if kind == _ARRAY:
            return [self._array(key) for _ in range(count)]
        raise CheckpointError(f"{self.path} is damaged: metadata {key} has unknown value type {kind}")

    def _truncated(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is truncated: {what} extends beyond the file's {len(self._map)} bytes; "
            f"download it again"
        )


def _shortest(value: float) -> float:
    """A float32 as the decimal it was written from: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
