"""New weights for a model that runs: whatever the user names becomes an engine that the executor can
load, while the old one serves."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pelton.engine.artifact import Engine, open_engine
from pelton.engine.temporary import alive
from pelton.engine.user_cache import cache_dir, local_path
from pelton.errors import ConfigError
from pelton.serving.engine_cache import classify, download

#: An engine, a checkpoint (folder, GGUF file or hub id), or arrays by Hugging Face tensor name.
Weights = str | os.PathLike[str] | Mapping[str, Any]


class NewWeights:
    """Makes the engines of one running model, in a folder of their own in the cache.

    ``prepare``, let the executor load what it gives, then ``adopt`` it. ``close`` removes the folder:
    a running session needs its files no more, since it has them mapped.
    """

    def __init__(self, engine: Path) -> None:
        self._current = engine
        self._folder: Path | None = None
        self._count = 0

    def prepare(self, weights: Weights, names: Sequence[str] = ()) -> Engine:
        """An engine with the plan of the running one, its files verified. Takes as long as reading and
        writing the weights does.

        Raises ``CheckpointError``, ``EngineError`` or ``ConfigError``; nothing has then changed.
        """
        from pelton.builder.arrays import ArrayCheckpoint
        from pelton.builder.refit import refit

        checkpoint: ArrayCheckpoint | Path
        if isinstance(weights, Mapping):
            if names:
                raise ConfigError("names choose tensors of a checkpoint; of arrays, give those that you mean")
            base = open_engine(self._current)
            config = base.weight_sources().config
            checkpoint = ArrayCheckpoint(weights, config, "arrays")
            names = [_exactly(name) for name in weights]
            if not names:
                raise ConfigError("there are no arrays; give at least one")
        else:
            kind = classify(weights)
            if kind == "engine":
                if names:
                    raise ConfigError(f"names choose tensors of a checkpoint, and {weights} is an engine")
                return open_engine(local_path(weights), verify=True)
            checkpoint = download(os.fspath(weights)) if kind == "hub" else local_path(weights)
        self._count += 1
        output = self._made_folder() / f"{self._count}.engine"
        refit(self._current, checkpoint, names=names, output=output)
        return open_engine(output)

    def adopt(self, engine: Engine) -> None:
        """``engine`` runs now: named weights of the next refit are put into this one."""
        before, self._current = self._current, engine.path
        if self._folder is not None and before.parent == self._folder and before != engine.path:
            shutil.rmtree(before, ignore_errors=True)

    def close(self) -> None:
        """Remove what was made; idempotent."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _made_folder(self) -> Path:
        if self._folder is None:
            parent = cache_dir() / "refits"
            parent.mkdir(parents=True, exist_ok=True)
            _remove_stale(parent)
            self._folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=parent))
        return self._folder


def _exactly(name: str) -> str:
    """A shell pattern that fits ``name`` alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _remove_stale(parent: Path) -> None:
    """Folders of processes that were killed."""
    for folder in parent.iterdir():
        pid = folder.name.partition("-")[0]
        if pid.isdigit() and not alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
