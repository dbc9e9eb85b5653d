"""Builds a random bfloat16 checkpoint and prints what memory that took, as JSON.

Run as a process of its own: ``python -m tests.builder.streaming_build FOLDER CONFIG_JSON``.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch

from pelton.builder.peak import anonymous_bytes

AFTER_IMPORT_TORCH = anonymous_bytes()

from pelton.builder.build import build  # noqa: E402
from pelton.builder.facts import expected_tensors  # noqa: E402
from pelton.models.registry import create_model  # noqa: E402

SHARD_BYTES = 4_000_000_000
_BLOCK = (1 << 22) + 1


def write_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """A Hugging Face folder with safetensors shards, written a piece at a time."""
    (folder / "config.json").write_text(json.dumps(config))
    words = {"<unk>": 0, "the": 1, "and": 2}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>")).save(
        str(folder / "tokenizer.json")
    )
    model = create_model(config, max_seq_len=config["max_position_embeddings"])
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in expected_tensors(model).items():
        if 2 * sum(map(math.prod, (*shards[-1].values(), shape))) > SHARD_BYTES and shards[-1]:
            shards.append({})
        shards[-1][name] = shape
    # Signs and mantissas at random, magnitudes 2^-7 to 2^-5.
    bits = np.random.default_rng(0).integers(0, 1 << 16, _BLOCK, dtype=np.uint16)
    block = (bits & 0x80FF) | 0x3C00
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for file_name, tensors in zip(names, shards, strict=True):
        _write_shard(folder / file_name, tensors, block)
    weight_map = {name: file for file, tensors in zip(names, shards, strict=True) for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _write_shard(path: Path, tensors: dict[str, tuple[int, ...]], block: Any) -> None:
    entries, at = {}, 0
    for name, shape in tensors.items():
        size = 2 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        start = 0
        for shape in tensors.values():
            # The block over and over: its odd length shifts it against the rows, and between tensors.
            left = math.prod(shape)
            while left:
                piece = block[start : start + left]
                file.write(piece)
                left -= piece.size
                start = (start + piece.size) % _BLOCK


def main() -> None:
    torch.set_num_threads(1)
    folder, config = Path(sys.argv[1]), json.loads(sys.argv[2])
    checkpoint_folder = folder / "checkpoint"
    checkpoint_folder.mkdir()
    write_checkpoint(checkpoint_folder, config)
    at_stage: dict[str, int] = {}

    def progress(stage: str, done: int, total: int) -> None:
        at_stage.setdefault(stage, anonymous_bytes())

    report = build(checkpoint_folder, output=folder / "engine", progress=progress)
    print(
        json.dumps(
            {
                "after_import_torch": AFTER_IMPORT_TORCH,
                "at_weights": at_stage["weights"],
                "peak": report.machine.peak_build,
                "weights": report.memory.weights,
                "max_error": report.quality.max_error if report.quality else None,
                "runner": report.quality.runner if report.quality else None,
                "seconds": report.machine.seconds,
            }
        )
    )


if __name__ == "__main__":
    main()
