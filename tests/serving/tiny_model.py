"""A real engine of a tiny random Llama with a tokenizer of bytes, and its checkpoint on disk."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from pelton.builder.build import build
from pelton.engine.config import BuildConfig
from tests.builder.random_checkpoint import TINY_LLAMA, RandomCheckpoint
from tests.serving.fake_engine import EOS, VOCAB_SIZE, write_tokenizer

CONFIG = TINY_LLAMA | {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "eos_token_id": EOS,
    "bos_token_id": 256,
}
BUILD = BuildConfig(
    block_size=8, max_batch_size=16, max_num_tokens=64, dtype="float32", kv_dtype="float32", threads=1
)


class TextCheckpoint(RandomCheckpoint):
    """Random weights by ``seed``; ``other`` changes the model."""

    def __init__(self, seed: int, **other: object) -> None:
        super().__init__(CONFIG | other, seed=seed, name=f"seed{seed}")

    def write_tokenizer(self, directory: Path) -> None:
        write_tokenizer(directory, chat_template=False)

    def save(self, folder: Path) -> Path:
        """The checkpoint as a Hugging Face folder."""
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        arrays = {name: np.ascontiguousarray(self.read(name).data) for name in self.tensors}
        save_file(arrays, folder / "model.safetensors")
        self.write_tokenizer(folder)
        return folder


def build_tiny(folder: Path, seed: int, **other: object) -> Path:
    """Its engine."""
    output = folder / f"seed{seed}{''.join(other)}.engine"
    build(TextCheckpoint(seed, **other), BUILD, output=output, check=False)
    return output
