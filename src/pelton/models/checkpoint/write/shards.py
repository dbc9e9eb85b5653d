"""Writes safetensors files a tensor at a time, none larger than a shard may be, and their index.

A file's header comes first and is known last: room is left for it, and what is not used is spaces, which the
format allows.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

#: Bytes of a file's header, padding included.
_HEADER = 1 << 18
MAX_SHARD = 4 << 30


class Part(NamedTuple):
    """A tensor to store: safetensors' name of its type, and its bytes in an array of its shape."""

    type: str
    data: npt.NDArray[Any]


class SafetensorsWriter:
    """``write`` tensors in any order; leaving the block without an error names the files for good."""

    def __init__(self, folder: Path, max_shard: int = MAX_SHARD) -> None:
        self._folder, self._max_shard = folder, max_shard
        self._file: IO[bytes] | None = None
        self._header: dict[str, Any] = {}
        self._size = 0
        self._names = 0
        self._weight_map: dict[str, int] = {}
        self._total = 0
        self._count = 0

    def __enter__(self) -> SafetensorsWriter:
        return self

    def write(self, name: str, part: Part) -> None:
        """Append one tensor."""
        assert name not in self._weight_map, f"{name} is written twice"
        data = np.ascontiguousarray(part.data)
        entry = {"dtype": part.type, "shape": list(part.data.shape)}
        room = len(self._header) * 150 + self._names + 150 + len(name) < _HEADER
        if self._file is None or not room or (self._size and self._size + data.nbytes > self._max_shard):
            self._finish_shard()
            self._count += 1
            self._file = self._path(self._count).open("wb")
            self._file.write(b" " * (8 + _HEADER))
        self._names += len(json.dumps(name))
        self._header[name] = {**entry, "data_offsets": [self._size, self._size + data.nbytes]}
        self._file.write(data.data if data.ndim else data.tobytes())
        self._size += data.nbytes
        self._total += data.nbytes
        self._weight_map[name] = self._count

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            if self._file is not None:
                self._file.close()
            return
        self._finish_shard()
        names = {i: f"model-{i:05}-of-{self._count:05}.safetensors" for i in range(1, self._count + 1)}
        if self._count == 1:
            names[1] = "model.safetensors"
        for i, name in names.items():
            self._path(i).rename(self._folder / name)
        if self._count > 1:
            weight_map = {tensor: names[i] for tensor, i in self._weight_map.items()}
            index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))

    def _path(self, i: int) -> Path:
        return self._folder / f"shard-{i}.partial"

    def _finish_shard(self) -> None:
        if self._file is None:
            return
        header = json.dumps({"__metadata__": {"format": "pt"}, **self._header}).encode()
        assert len(header) <= _HEADER
        self._file.seek(0)
        self._file.write(_HEADER.to_bytes(8, "little") + header)
        self._file.close()
        self._file, self._header, self._size, self._names = None, {}, 0, 0
