"""What a quantisation has finished, a file a layer, so that one that was killed goes on where it was.

``OUTPUT.partial/`` holds ``state.json`` (what is being made: another recipe or checkpoint is refused) and
``layer-<n>.npz``, each written whole and renamed.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pelton.builder.quantize_report import LayerReport
from pelton.errors import CheckpointError, ConfigError
from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.tensors import HostTensor

_META = "meta"


class _Tensor(msgspec.Struct):
    quant: str
    shape: tuple[int, ...]


class _Meta(msgspec.Struct):
    tensors: dict[str, _Tensor]
    activations: dict[str, ActivationQuant]
    report: LayerReport


class _State(msgspec.Struct):
    digest: str
    what: str


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a decoder layer (or, as the last one, of what is outside of them)."""

    tensors: dict[str, HostTensor]
    """By Hugging Face name: quantised weights (out, in), and dense tensors that scaling changed."""
    activations: dict[str, ActivationQuant]
    """By weight tensor."""
    report: LayerReport


class QuantizeState:
    """The folder of finished layers. Raises ``ConfigError`` where it belongs to something else,
    ``CheckpointError`` where it cannot be written."""

    def __init__(self, folder: Path, digest: str, what: str) -> None:
        self.folder = folder
        self._metas: dict[int, _Meta] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / "state.json"
            if path.exists() and self._goes_on(path, digest, what):
                return
            if not path.exists() and any(folder.iterdir()):
                raise ConfigError(f"{folder} is in the way and no unfinished quantisation; remove it")
            _write(path, msgspec.json.encode(_State(digest, what)))
        except OSError as error:
            raise _not_written(folder, error) from error

    def _goes_on(self, path: Path, digest: str, what: str) -> bool:
        """Whether what the folder holds is of this quantisation; False: of another, with no layer yet."""
        try:
            state = msgspec.json.decode(path.read_bytes(), type=_State)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path} is damaged ({error}); delete {self.folder} to begin anew") from error
        if state.digest == digest:
            return True
        if any(self.folder.glob("layer-*.npz")):
            other = f"{state.what}, of other weights, settings or text" if state.what == what else state.what
            raise ConfigError(
                f"{self.folder} holds an unfinished quantisation of another kind ({other}), not {what}; "
                "delete it, or choose another output"
            )
        return False

    def has(self, index: int) -> bool:
        """Whether a layer is finished."""
        return self._path(index).exists()

    def save(self, index: int, layer: Layer) -> None:
        """Keep a finished layer: whole or not at all."""
        meta = _Meta(
            {name: _Tensor(t.quant, t.shape) for name, t in layer.tensors.items()},
            layer.activations,
            layer.report,
        )
        encoded = np.frombuffer(msgspec.json.encode(meta), np.uint8)
        path = self._path(index)
        temporary = path.with_suffix(".tmp")
        try:
            with temporary.open("wb") as file:
                arrays = {name: np.ascontiguousarray(t.data) for name, t in layer.tensors.items()}
                np.savez(file, **{_META: encoded}, **arrays)  # type: ignore[arg-type]
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise _not_written(path, error) from error

    def load(self, index: int) -> Layer:
        """A finished layer."""
        meta = self._meta(index)
        tensors = {name: self._read(index, name, t) for name, t in meta.tensors.items()}
        return Layer(tensors=tensors, activations=meta.activations, report=meta.report)

    def describe(self, indices: Iterable[int]) -> dict[str, tuple[int, str, tuple[int, ...]]]:
        """Tensor name -> its layer, type and shape."""
        return {
            name: (index, t.quant, t.shape)
            for index in indices
            for name, t in self._meta(index).tensors.items()
        }

    def activations(self, indices: Iterable[int]) -> Mapping[str, ActivationQuant]:
        """Of all weight tensors."""
        return {name: a for index in indices for name, a in self._meta(index).activations.items()}

    def report(self, index: int) -> LayerReport:
        """Of a finished layer."""
        return self._meta(index).report

    def read(self, index: int, name: str) -> HostTensor:
        """One tensor of a finished layer."""
        return self._read(index, name, self._meta(index).tensors[name])

    def _read(self, index: int, name: str, tensor: _Tensor) -> HostTensor:
        return HostTensor(tensor.quant, tensor.shape, self._array(index, name))

    def _meta(self, index: int) -> _Meta:
        if index not in self._metas:
            self._metas[index] = msgspec.json.decode(self._array(index, _META).tobytes(), type=_Meta)
        return self._metas[index]

    def _array(self, index: int, name: str) -> np.ndarray[Any, Any]:
        """Raises ``CheckpointError`` naming the file where it is not as it was written."""
        path = self._path(index)
        try:
            with np.load(path, allow_pickle=False) as arrays:
                found: np.ndarray[Any, Any] = arrays[name]
                return found
        except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise CheckpointError(
                f"{path} is damaged ({error}); delete it, and the same command quantises that layer again"
            ) from error

    def _path(self, index: int) -> Path:
        return self.folder / f"layer-{index:04}.npz"


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Holds ``folder``, made where it is not there, against other processes that quantise into it; empty, it
    goes again.

    Raises ``ConfigError`` where one does, ``CheckpointError`` where it cannot be written.
    """
    import fcntl

    try:
        folder.mkdir(exist_ok=True)
        held = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise _not_written(folder, error) from error
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another process is quantising in {folder}; wait for it, or choose another output"
            ) from error
        except OSError:
            pass  # a file system without locks
        try:
            yield
        finally:
            with suppress(OSError):
                folder.rmdir()  # where it is empty
    finally:
        os.close(held)


def _not_written(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"cannot write {path}: {error.strerror or error}; layers that are done are kept, and the same "
        "command goes on there"
    )


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(data)
    temporary.replace(path)
