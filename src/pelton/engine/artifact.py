"""The engine directory: what is in it, and opening one safely.

Opening reads three small JSON files and maps the weights; it takes milliseconds. Whatever is wrong
is one ``EngineError`` sentence that says what to do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar

import msgspec

from pelton.engine.config import EngineConfig
from pelton.engine.plan import Plan
from pelton.engine.plan_check import check_plan
from pelton.engine.shards import Shards, TensorMeta
from pelton.engine.trust import FOLDER, code_in
from pelton.engine.weight_sources import WeightSources
from pelton.errors import EngineError
from pelton.kernels import native
from pelton.kernels.cpu_levels import ANY
from pelton.version import __version__

#: 2: weights.json. Engines of format 1 cannot be refitted and their plans have fewer fields: rebuilt.
#: 4: the kernels that GPU engines bring for a step's inputs and tokens take other arguments.
#: 5: which these are is in code.json. 6: what tensor cores add up in is a setting.
FORMAT_VERSION = 6
#: ``PELTON_ABI_VERSION`` of csrc/pelton.h: kernels' names, attributes and weight layouts.
NATIVE_ABI = 2
#: Kinds of devices that this Pelton runs engines on: ``cpu``, and GPUs as ``sm_90``.
CPU, GPU_PREFIX = "cpu", "sm_"

#: Small files that decide what runs.
_ALWAYS_HASHED = ("config.json", "plan.json")

T = TypeVar("T")


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the engine; ``path`` is relative, with forward slashes."""

    path: str
    nbytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """``manifest.json``: what is needed to know before anything else is read."""

    format_version: int
    pelton_version: str
    native_abi: int
    target: str
    """Device the plan was made for: ``cpu``."""
    cpu_level: str = ANY
    """CPU level that the chosen kernels need (``kernels/cpu_levels.py``), or ``any``."""
    needs: tuple[str, ...] = ()
    """What this engine needs of Pelton that older versions lack; one that does not know it refuses."""
    packages: dict[str, str] = {}
    """Python packages whose functions the engine calls -> version at build."""
    stripped: bool = False
    """The weights have been taken out; the constants are there."""
    files: tuple[FileEntry, ...]


class _Version(msgspec.Struct, frozen=True):
    format_version: int


@dataclass(frozen=True)
class Engine:
    """An opened engine. Weights are mapped, not read."""

    path: Path
    manifest: Manifest
    config: EngineConfig
    plan: Plan
    weights: Shards
    engine_id: str
    """Changes with any byte of the engine: hash of the manifest, which holds every file's hash."""

    @property
    def tokenizer_path(self) -> Path:
        """Folder with ``tokenizer.json``, chat template and generation defaults."""
        return self.path / "tokenizer"

    @property
    def on_gpu(self) -> bool:
        """Whether it was built for an NVIDIA GPU."""
        return self.manifest.target.startswith(GPU_PREFIX)

    @property
    def nbytes(self) -> int:
        """Size of all files of the engine."""
        return sum(f.nbytes for f in self.manifest.files)

    @property
    def code(self) -> list[str]:
        """Code that running this engine runs, besides Pelton's own (``engine.trust``)."""
        return code_in((f.path for f in self.manifest.files), self.plan)

    @property
    def stripped(self) -> bool:
        """Whether the weights have been taken out (``pelton strip``): such an engine cannot run."""
        return self.manifest.stripped

    def require_weights(self) -> None:
        """Raise ``EngineError`` for a stripped engine."""
        if self.stripped:
            raise EngineError(
                f"{self.path} is stripped: it holds no weights; "
                f"put some in with: pelton refit {self.path} CHECKPOINT"
            )

    def weight_sources(self) -> WeightSources:
        """How the weights are made from a checkpoint: ``weights.json``."""
        return self.read_json("weights.json", WeightSources)

    def report(self) -> dict[str, object]:
        """``report.json`` of the build."""
        return self.read_json("report.json", dict[str, object])

    def read_json(self, name: str, kind: type[T]) -> T:
        """The file ``name`` of the engine as a ``kind``. Raises ``EngineError``, also where it is not the
        file that the manifest names: such files are not read, so not hashed, when the engine is opened."""
        self.verify_file(name)
        return _decode(self.path / name, kind)

    def verify_file(self, name: str) -> None:
        """Raise ``EngineError`` where a file of the engine is not the one that the manifest names."""
        for entry in self.manifest.files:
            if entry.path == name:
                _check_file(self.path, entry, verify=True)
                return
        raise _damaged(self.path / "manifest.json", f"it does not list {name}")


def is_engine(path: str | Path) -> bool:
    """True for a directory that claims to be an engine (it may still be damaged)."""
    return (Path(path) / "manifest.json").is_file()


def open_engine(path: str | Path, *, verify: bool = False) -> Engine:
    """Open the engine directory at ``path``.

    ``verify`` compares the SHA-256 of all files; without it that of the small files that say what
    runs (JSON), and of the others only that they are there and their sizes. Raises ``EngineError``.
    """
    root = Path(path)
    if not root.exists():
        raise EngineError(f"there is no engine at {root}; build one with: pelton build CHECKPOINT -o {root}")
    if not root.is_dir():
        raise EngineError(f"{root} is a file, not an engine directory; build one with: pelton build {root}")
    manifest_path = root / "manifest.json"
    if not manifest_path.is_file():
        raise EngineError(
            f"{root} is not an engine: it has no manifest.json; "
            f"if it is a checkpoint, build an engine with: pelton build {root}"
        )
    manifest = _read_manifest(manifest_path)
    for entry in manifest.files:
        _check_file(root, entry, verify)
    config = _decode(root / "config.json", EngineConfig)
    unset = [name for name in config.build.__struct_fields__ if getattr(config.build, name) is None]
    if unset:
        raise EngineError(
            f"{root} has no value of build.{unset[0]} in config.json: another Pelton "
            f"({manifest.pelton_version}) built it, or it was edited; rebuild it with this one"
        )
    if config.build.target != manifest.target:
        why = f"it is for {config.build.target}, the manifest for {manifest.target}"
        raise _damaged(root / "config.json", why)
    plan = _decode(root / "plan.json", Plan)
    weights = Shards(root / f.path for f in manifest.files if PurePosixPath(f.path).suffix == ".safetensors")
    _check_libraries(root, manifest, plan)
    metas = {**_planned(plan), **weights.meta} if manifest.stripped else weights.meta
    try:
        check_plan(plan, config, metas)
    except ValueError as error:
        raise _damaged(root / "plan.json", str(error)) from error
    engine_id = hashlib.sha256(manifest_path.read_bytes()).hexdigest()
    return Engine(root, manifest, config, plan, weights, engine_id)


def _check_libraries(root: Path, manifest: Manifest, plan: Plan) -> None:
    """Raise ``EngineError`` for a library that the engine's trust (its files) would not cover."""
    files = {f.path for f in manifest.files if f.path.startswith(FOLDER)}
    for name, tactic in plan.external.items():
        if tactic.kind == "library" and tactic.file not in files:
            why = f"the tactic {name} is in {tactic.file!r}, no file of the engine's code"
            raise _damaged(root / "plan.json", why)


def _planned(plan: Plan) -> dict[str, TensorMeta]:
    """The weights that a stripped engine lacks, as its plan describes them."""
    return {
        b.name: TensorMeta(
            name=b.name,
            quant=b.quant,
            layout=b.layout,
            shape=tuple(d for d in b.shape if isinstance(d, int)),
            nbytes=b.nbytes,
        )
        for b in plan.buffers
        if b.kind == "weight"
    }


def _read_manifest(path: Path) -> Manifest:
    version = _decode(path, _Version).format_version
    if version > FORMAT_VERSION:
        raise EngineError(
            f"{path.parent} has engine format {version}, newer than this Pelton reads ({FORMAT_VERSION}); "
            "upgrade Pelton or rebuild the engine"
        )
    if version < FORMAT_VERSION:
        raise EngineError(
            f"{path.parent} has engine format {version}, which this Pelton no longer reads "
            f"({FORMAT_VERSION}); rebuild the engine"
        )
    manifest = _decode(path, Manifest)
    if manifest.target != CPU and not manifest.target.startswith(GPU_PREFIX):
        raise EngineError(
            f"{path.parent} was built for {manifest.target}, and this Pelton runs {CPU} and NVIDIA GPU "
            "engines; rebuild it for this machine"
        )
    if manifest.native_abi != NATIVE_ABI:
        raise EngineError(
            f"{path.parent} was built for native library interface {manifest.native_abi} and this Pelton "
            f"{__version__} has {NATIVE_ABI}; rebuild the engine or install Pelton {manifest.pelton_version}"
        )
    level = manifest.cpu_level
    # Without the library only the reference can run, which needs no instruction set.
    if level != ANY and native.available() and not native.has_level(level):
        raise EngineError(
            f"{path.parent} was built for CPUs of level {level}, and this one is {native.cpu_level()}; "
            "rebuild it on this machine, or for all CPUs with cpu_level any"
        )
    for package in manifest.needs:
        raise EngineError(f"{path.parent} needs {package}, which this Pelton cannot use; upgrade Pelton")
    return manifest


def _check_file(root: Path, entry: FileEntry, verify: bool) -> None:
    relative = PurePosixPath(entry.path)
    if relative.is_absolute() or ".." in relative.parts:
        raise _damaged(root / "manifest.json", f"it names a file outside the engine, {entry.path!r}")
    path = root / entry.path
    try:
        size = path.stat().st_size
    except OSError:
        raise EngineError(
            f"{root} is incomplete: {entry.path} is missing; copy it again or rebuild the engine"
        ) from None
    if size != entry.nbytes:
        raise EngineError(
            f"{root} is damaged: {entry.path} has {size} bytes instead of {entry.nbytes}; "
            "copy it again or rebuild the engine"
        )
    if (verify or path.name in _ALWAYS_HASHED) and file_sha256(path) != entry.sha256:
        raise EngineError(
            f"{root} is damaged: {entry.path} does not have the SHA-256 its manifest says "
            "(edited by hand, or copied badly); copy it again or rebuild the engine"
        )


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _decode(path: Path, kind: type[T]) -> T:
    decode: Callable[..., T] = msgspec.json.decode
    try:
        return decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise EngineError(
            f"{path.parent} is incomplete: {path.name} cannot be read ({error.strerror}); rebuild the engine"
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, why: str) -> EngineError:
    return EngineError(f"{path.parent} is damaged: {path.name}: {why}; copy the engine again or rebuild it")
