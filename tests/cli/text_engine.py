"""A tiny random engine that can read text: one token per byte."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pelton.builder.build import build
from pelton.engine.artifact import Manifest
from pelton.engine.config import BuildConfig
from pelton.engine.plan import Plan
from tests.builder.random_checkpoint import TINY_LLAMA, RandomCheckpoint
from tests.serving.fake_engine import VOCAB_SIZE, write_tokenizer

MODEL = {**TINY_LLAMA, "vocab_size": VOCAB_SIZE, "num_hidden_layers": 4}
LIMITS: dict[str, Any] = {"block_size": 8, "max_batch_size": 4, "max_num_tokens": 40, "threads": 1}


class TextCheckpoint(RandomCheckpoint):
    """Random weights with the fake engine's tokenizer."""

    def write_tokenizer(self, directory: Path) -> None:
        write_tokenizer(directory, chat_template=False)


def text_checkpoint(quant: Any = "float32", **changes: Any) -> TextCheckpoint:
    """A four-layer Llama."""
    return TextCheckpoint({**MODEL, **changes}, quant=quant)


def build_text_engine(output: Path, checkpoint: RandomCheckpoint | None = None, **config: Any) -> Path:
    """The engine of ``checkpoint`` at ``output``."""
    build(checkpoint or text_checkpoint(), BuildConfig(**{**LIMITS, **config}), output=output)
    return output


def edit_plan(engine: Path, edit: Callable[[Plan], Plan]) -> None:
    """Change an engine's plan by hand, so that its manifest still holds."""
    path = engine / "plan.json"
    plan = edit(msgspec.json.decode(path.read_bytes(), type=Plan))
    path.write_bytes(msgspec.json.encode(plan))
    _mend_manifest(engine)


def spoil_weight(engine: Path, name: str) -> None:
    """Negate a float32 weight in its shard."""
    from pelton.engine.artifact import open_engine

    (shard,) = (engine / "weights").iterdir()
    weights = open_engine(engine).weights
    start = weights[name].ctypes.data - weights.files[0].ctypes.data
    data = bytearray(shard.read_bytes())
    values = np.frombuffer(data, np.float32, weights.meta[name].nbytes // 4, start)
    values *= np.float32(-1)
    shard.write_bytes(data)
    _mend_manifest(engine)


def _mend_manifest(engine: Path) -> None:
    path = engine / "manifest.json"
    manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    files = []
    for entry in manifest.files:
        data = (engine / entry.path).read_bytes()
        files.append(
            msgspec.structs.replace(entry, nbytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        )
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, files=tuple(files))))


def edit_report(engine: Path, **parts: Any) -> None:
    """Replace parts of an engine's report; None removes one."""
    path = engine / "report.json"
    report = {**msgspec.json.decode(path.read_bytes()), **parts}
    path.write_bytes(msgspec.json.encode({k: v for k, v in report.items() if v is not None}))
    _mend_manifest(engine)
