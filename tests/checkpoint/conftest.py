"""Good tiny checkpoints, to be copied and spoilt."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.checkpoint.makers import tiny_gguf, tiny_hf_checkpoint


@pytest.fixture(scope="session")
def good_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf_checkpoint("llama", tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="session")
def good_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf_checkpoint("llama", tmp_path_factory.mktemp("shards"), max_shard_size="150KB")


@pytest.fixture(scope="session")
def good_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf("llama", tmp_path_factory.mktemp("gguf"))


@pytest.fixture
def folder(good_folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(good_folder, tmp_path / "model")
    return tmp_path / "model"
