"""An engine without its weights: what to ship where they are already, or must not go. No torch."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec

from pelton.builder.directory import check_output, engine_directory
from pelton.builder.engine_files import file_entries, write_json
from pelton.engine.artifact import open_engine
from pelton.engine.shards import ShardWriter
from pelton.engine.trust import is_trusted, remember
from pelton.errors import ConfigError


def strip(engine: str | Path, output: str | Path) -> int:
    """Write ``engine`` without its weights to ``output``; ``refit`` fills it. Returns its bytes.

    Constants (RoPE tables), the plan and the tokenizer stay. Raises ``EngineError`` for an engine that
    cannot be opened or is stripped already, ``ConfigError`` for an output that cannot be written.
    """
    opened = open_engine(engine)
    opened.require_weights()
    target = Path(output)
    if target.resolve() == opened.path.resolve():
        raise ConfigError(
            f"{target} is the engine itself, whose weights would be lost; choose another output"
        )
    check_output(target)
    constants = [opened.weights.meta[b.name] for b in opened.plan.buffers if b.kind == "constant"]
    with engine_directory(target) as folder:
        for entry in opened.manifest.files:
            if not entry.path.endswith(".safetensors"):
                (folder / entry.path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(opened.path / entry.path, folder / entry.path)
        with ShardWriter(folder / "weights", constants) as writer:
            for meta in constants:
                writer.write(meta.name, opened.weights[meta.name])
        if not writer.files:
            os.rmdir(folder / "weights")
        hashes = {path: sha256 for path, _, sha256 in writer.files}
        files = file_entries(folder, hashes)
        manifest = msgspec.structs.replace(opened.manifest, stripped=True, files=files)
        write_json(folder / "manifest.json", manifest)
    if is_trusted(opened):
        remember(open_engine(target))
    return sum(f.nbytes for f in files)
