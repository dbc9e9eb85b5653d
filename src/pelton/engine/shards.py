"""Weight shards: safetensors files whose tensors are packed bytes.

Each shard is the safetensors format (8-byte little-endian header length, JSON header, data), so
common tools can open it. Every tensor is a U8 blob padded to 64 bytes, and the header is padded so
that data starts 64-byte aligned: a mapped shard can be used in place. What the bytes mean is in
the header's ``__metadata__``: one JSON object per tensor name (``TensorMeta``).
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from pelton.errors import EngineError

ALIGNMENT = 64
SHARD_BYTES = 2_000_000_000
_MAX_HEADER = 100_000_000

Bytes = npt.NDArray[np.uint8]


def align(n: int) -> int:
    """``n`` rounded up to the alignment of blobs and buffers."""
    return -(-n // ALIGNMENT) * ALIGNMENT


class TensorMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What a blob holds: ``nbytes`` bytes of ``shape`` values of type ``quant`` in ``layout``."""

    name: str
    quant: str
    layout: str
    shape: tuple[int, ...]
    nbytes: int


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class ShardWriter:
    """Writes tensors one at a time, in the announced order, with nothing else in memory.

    ``files`` gives (path, bytes, sha256) of every finished shard. Use as a context manager.
    """

    def __init__(self, folder: Path, tensors: Iterable[TensorMeta], shard_bytes: int = SHARD_BYTES) -> None:
        self._shards = _split(list(tensors), shard_bytes)
        self._folder = folder
        self._pending: list[TensorMeta] = []
        self._next_shard = 0
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()
        self._written = 0
        self.files: list[tuple[Path, int, str]] = []
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, data: Bytes | Iterable[Bytes]) -> None:
        """Append the next tensor; ``data`` is its uint8 bytes, whole or in pieces, exactly as many as
        announced."""
        if not self._pending:
            self._open_next()
        meta = self._pending.pop(0)
        assert meta.name == name, f"expected {meta.name}, got {name}"
        nbytes = 0
        for piece in (data,) if isinstance(data, np.ndarray) else data:
            assert piece.dtype == np.uint8
            self._put(np.ascontiguousarray(piece).reshape(-1).data)
            nbytes += piece.nbytes
        assert nbytes == meta.nbytes, f"{name}: announced {meta.nbytes} bytes, got {nbytes}"
        self._put(memoryview(bytes(align(meta.nbytes) - meta.nbytes)))
        if not self._pending:
            self._finish()

    def _open_next(self) -> None:
        self._pending = list(self._shards[self._next_shard])
        self._next_shard += 1
        path = self._folder / f"model-{self._next_shard:05}-of-{len(self._shards):05}.safetensors"
        self._file, self._hash, self._written = path.open("wb"), hashlib.sha256(), 0
        self._put(memoryview(_header(self._pending)))

    def _put(self, data: memoryview) -> None:
        assert self._file is not None
        self._file.write(data)
        self._hash.update(data)
        self._written += data.nbytes

    def _finish(self) -> None:
        assert self._file is not None
        self._file.close()
        self.files.append((Path(self._file.name), self._written, self._hash.hexdigest()))
        self._file = None

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
        if error is None:
            assert not self._pending and self._next_shard == len(self._shards), "tensors are missing"


class Shards:
    """The tensors of an engine's shards, mapped read-only: nothing is read until it is used."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.meta: dict[str, TensorMeta] = {}
        self._blobs: dict[str, Bytes] = {}
        self.files: list[Bytes] = []
        """Each shard as it is mapped, from its first byte."""
        for path in paths:
            self._map(path)

    def __getitem__(self, name: str) -> Bytes:
        """The tensor's bytes: (nbytes,) uint8, 64-byte aligned, padding excluded."""
        return self._blobs[name]

    def __contains__(self, name: object) -> bool:
        return name in self._blobs

    def __iter__(self) -> Iterable[str]:  # type: ignore[override]
        return iter(self._blobs)

    def _map(self, path: Path) -> None:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < 8:
                raise EngineError(f"{path} is damaged: too short for a weight shard; rebuild the engine")
            mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
        (length,) = struct.unpack("<Q", mapped[:8].tobytes())
        if length > min(size - 8, _MAX_HEADER):
            raise EngineError(f"{path} is damaged: its header is longer than the file; rebuild the engine")
        try:
            header = msgspec.json.decode(mapped[8 : 8 + length].tobytes(), type=dict[str, msgspec.Raw])
            notes = msgspec.json.decode(header.pop("__metadata__"), type=dict[str, str])
            entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
            metas = {name: msgspec.json.decode(notes[name], type=TensorMeta) for name in entries}
        except (msgspec.MsgspecError, KeyError, UnicodeDecodeError) as error:
            raise EngineError(f"{path} is damaged: its header cannot be read; rebuild the engine") from error
        self.files.append(mapped)
        data = mapped[8 + length :]
        for name, entry in entries.items():
            start, stop = entry.data_offsets
            if not 0 <= start <= start + metas[name].nbytes <= stop <= data.size:
                raise EngineError(f"{path} is damaged: {name} lies outside the file; rebuild the engine")
            self.meta[name] = metas[name]
            self._blobs[name] = data[start : start + metas[name].nbytes]


def _split(tensors: list[TensorMeta], shard_bytes: int) -> list[list[TensorMeta]]:
    """Consecutive tensors grouped into shards of at most ``shard_bytes`` (or a single tensor)."""
    shards: list[list[TensorMeta]] = []
    room = 0
    for meta in tensors:
        size = align(meta.nbytes)
        if not shards or size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(meta)
        room -= size
    return shards


def _header(tensors: list[TensorMeta]) -> bytes:
    entries: dict[str, object] = {
        "__metadata__": {meta.name: msgspec.json.encode(meta).decode() for meta in tensors}
    }
    offset = 0
    for meta in tensors:
        size = align(meta.nbytes)
        entries[meta.name] = {"dtype": "U8", "shape": [size], "data_offsets": [offset, offset + size]}
        offset += size
    text = msgspec.json.encode(entries)
    text += b" " * (align(8 + len(text)) - 8 - len(text))
    return struct.pack("<Q", len(text)) + text
