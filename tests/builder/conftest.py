"""Tiny engines, built once per run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pelton.builder.build import build
from pelton.engine.config import BuildConfig
from tests.builder.random_checkpoint import TINY_LLAMA, RandomCheckpoint

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer random Llama, float32, blocks of 8 tokens."""
    output = tmp_path_factory.mktemp("engines") / "tiny.engine"
    config = BuildConfig(block_size=8, max_batch_size=4, max_num_tokens=40)
    build(RandomCheckpoint(TINY_LLAMA), config, output=output)
    return output
