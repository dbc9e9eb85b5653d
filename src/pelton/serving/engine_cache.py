"""From what a user names (engine, folder, GGUF file, hub id) to an engine directory.

An engine is used where it lies, and nothing is written. Anything else is built once into the cache:
``$PELTON_CACHE``, else the platform's cache folder. The key of a cached engine is its checkpoint's
fingerprint, the build settings that were given and the versions; a lock file keeps two processes
from building the same engine twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

import pelton
from pelton.engine.config import BuildConfig
from pelton.engine.user_cache import cache_dir as cache_dir
from pelton.engine.user_cache import local_path as local_path
from pelton.errors import CheckpointError, ConfigError, EngineError, MissingDependencyError
from pelton.serving.overrides import OF_THE_SESSION

if TYPE_CHECKING:
    from pelton.builder.report import BuildReport

Kind = Literal["engine", "folder", "gguf", "hub"]

#: Told what is going on while a model is being resolved ("building ...", "waiting ...").
Notify = Callable[[str], None]


@dataclass(frozen=True)
class ResolvedModel:
    """Where the engine is, and whether the user pointed at it (then build flags must agree with it)."""

    engine: Path
    given_as_engine: bool


def classify(model: str | os.PathLike[str]) -> Kind:
    """What ``model`` is. Raises ``CheckpointError`` with what was looked for when it is nothing."""
    path = local_path(model)
    if path.is_dir():
        if (path / "manifest.json").is_file():
            return "engine"
        if (path / "config.json").is_file():
            return "folder"
        raise CheckpointError(
            f"{path} is neither an engine (it has no manifest.json) nor a checkpoint (no config.json)."
        )
    if path.exists():
        with path.open("rb") as file:
            if file.read(4) == b"GGUF":
                return "gguf"
        if path.name in ("config.json", "manifest.json") or path.suffix == ".safetensors":
            raise CheckpointError(f"{path} is one file of a model; give its folder {path.parent} instead.")
        raise CheckpointError(f"{path} is not a GGUF file (it does not begin with GGUF).")
    from pelton.models.checkpoint.hub import looks_like_hub_id

    if path.suffix not in (".gguf", ".engine") and looks_like_hub_id(os.fspath(model)):
        return "hub"
    raise CheckpointError(
        f"there is no {path}; give an engine directory, a Hugging Face folder, a GGUF file "
        "or a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct."
    )


def download(hub_id: str, notify: Notify | None = None) -> Path:
    """The local folder of a hub id, through the hub's own cache.

    The hub is asked each time it can be reached: a download that was cut off looks complete from here."""
    from pelton.models.checkpoint import hub

    if notify:
        notify(f"fetching {hub_id} from the hub, or its cache")
    return hub.download(hub_id)


def fingerprint(checkpoint: Path) -> str:
    """Changes when the checkpoint does: names, sizes, times, and the content of small files.

    Weights are not read (a 16 GB file would take longer to hash than to build from)."""
    digest = hashlib.blake2b(digest_size=16)
    files = [checkpoint] if checkpoint.is_file() else sorted(p for p in checkpoint.iterdir() if p.is_file())
    for file in files:
        stat = file.stat()
        digest.update(f"{file.name}\0{stat.st_size}\0".encode())
        if stat.st_size <= 1 << 20:
            digest.update(file.read_bytes())
        else:
            digest.update(f"{stat.st_mtime_ns}\0".encode())
            with file.open("rb") as stream:
                digest.update(stream.read(1 << 16))
    return digest.hexdigest()


def cached_engine_path(checkpoint: Path, config: BuildConfig) -> Path:
    """Where the engine of this checkpoint and these settings is, or will be."""
    from pelton.engine.artifact import FORMAT_VERSION
    from pelton.models.checkpoint.hub import folder_name

    plain = msgspec.structs.replace(config, **dict.fromkeys(OF_THE_SESSION))
    settings = msgspec.json.encode(plain, order="sorted")
    key = hashlib.blake2b(digest_size=8)
    for part in (fingerprint(checkpoint), pelton.__version__, str(FORMAT_VERSION), platform.machine()):
        key.update(part.encode() + b"\0")
    key.update(settings)
    name = re.sub(r"[^\w.-]+", "-", folder_name(checkpoint).removesuffix(".gguf"))
    return cache_dir() / "engines" / f"{name}-{key.hexdigest()}.engine"


@contextlib.contextmanager
def _locked(path: Path, notify: Notify | None) -> Iterator[None]:
    """Hold the lock file ``path``. Raises ``ConfigError`` where its folder cannot be written."""
    import fcntl

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise ConfigError(
            f"the cache {path.parent} cannot be written ({error.strerror}); "
            "set PELTON_CACHE to a folder that can, or build an engine with pelton build."
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if notify:
                notify("waiting for another process that builds the same engine")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _usable(engine: Path) -> bool:
    """Whether a cached engine opens on this machine; one that does not is rebuilt."""
    from pelton.engine.artifact import open_engine

    if not engine.is_dir():
        return False
    try:
        open_engine(engine)
    except EngineError:
        return False
    return True


def resolve_model(
    model: str | os.PathLike[str],
    config: BuildConfig | None = None,
    *,
    progress: Any = None,
    notify: Notify | None = None,
) -> ResolvedModel:
    """The engine of ``model``, built into the cache when it is not one already.

    Raises ``CheckpointError`` or ``ConfigError`` when it cannot be one."""
    config = config or BuildConfig()
    kind = classify(model)
    if kind == "engine":
        return ResolvedModel(local_path(model), given_as_engine=True)
    checkpoint = download(os.fspath(model), notify) if kind == "hub" else local_path(model)
    target = cached_engine_path(checkpoint, config)
    if _usable(target):
        return ResolvedModel(target, given_as_engine=False)
    with _locked(target.with_suffix(".lock"), notify):
        if not _usable(target):
            if notify:
                notify(f"building {target.name} (once; kept in {target.parent})")
            build_engine(checkpoint, config, target, progress=progress, notify=notify)
    return ResolvedModel(target, given_as_engine=False)


def build_engine(
    checkpoint: Path,
    config: BuildConfig,
    output: Path,
    *,
    progress: Any = None,
    notify: Notify | None = None,
    dry_run: bool = False,
    **options: Any,
) -> BuildReport:
    """Build ``checkpoint`` into ``output``; torch is imported here and not before. ``options``: further
    arguments of ``pelton.build``."""
    try:
        from pelton.builder.build import build
    except ImportError as error:
        raise MissingDependencyError(
            f"{checkpoint} must be built into an engine first, which needs {error.name or 'torch'}: "
            "pip install 'pelton[build]', or copy an engine that was built elsewhere."
        ) from error
    return build(
        checkpoint, config, output=output, progress=progress, notify=notify, dry_run=dry_run, **options
    )
