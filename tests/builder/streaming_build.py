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


def write_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """A Hugging Face folder with one safetensors file, written a piece at a time."""
    (folder / "config.json").write_text(json.dumps(config))
    words = {"<unk>": 0, "the": 1, "and": 2}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>")).save(
        str(folder / "tokenizer.json")
    )
    model = create_model(config, max_seq_len=config["max_position_embeddings"])
    entries, at = {}, 0
    tensors = expected_tensors(model)
    for name, shape in tensors.items():
        size = 2 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    rng = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for shape in tensors.values():
            left = math.prod(shape)
            while left:
                n = min(left, 1 << 22)
                # Signs and mantissas at random, magnitudes 2^-7 to 2^-5.
                bits = rng.integers(0, 1 << 16, n, dtype=np.uint16)
                file.write(((bits & 0x80FF) | 0x3C00).tobytes())
                left -= n


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
