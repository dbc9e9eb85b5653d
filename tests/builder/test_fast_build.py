"""A fast build leaves out what costs time, and computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pelton.builder.build import build
from pelton.builder.check import MAX_ERROR, MAX_KL, compare
from pelton.builder.probe import probe_steps
from pelton.engine.config import BuildConfig
from pelton.engine.session import Session
from tests.builder.random_checkpoint import RandomCheckpoint
from tests.models import zoo
from tests.models.oracle import hf_config_dict

ARCHITECTURES: dict[str, Any] = {"llama": zoo.llama, "gemma3": zoo.gemma3, "gpt2": zoo.gpt2}


def logits(engine: Path) -> Any:
    with Session(engine, kv_blocks=12) as session:
        steps, _ = probe_steps(session.config, engine / "tokenizer", seed=3)
        return np.concatenate([session.run(step).logits_NV.copy() for step in steps])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_of_fast_and_full_builds_agree(tmp_path: Path, architecture: str) -> None:
    reports = {}
    described = json.loads(json.dumps(hf_config_dict(ARCHITECTURES[architecture]())))
    described.setdefault("max_position_embeddings", 64)  # GPT-2 calls it otherwise
    for name, fast in (("full", False), ("fast", True)):
        config = BuildConfig(max_batch_size=2, max_seq_len=64, max_num_tokens=48, fast_build=fast)
        reports[name] = build(RandomCheckpoint(described), config, output=tmp_path / name)
    found = compare(logits(tmp_path / "full"), logits(tmp_path / "fast"))
    assert found["max_error"] <= MAX_ERROR["float32"]
    full, fast = reports["full"].quality, reports["fast"].quality
    assert full is not None and fast is not None and 0 < fast.positions < full.positions
    assert "fast build" in reports["fast"].text() and "fast build" not in reports["full"].text()


def test_logits_of_fast_and_full_smollm2_agree(tmp_path: Path, smollm2_gguf: Path) -> None:
    """With int8 activations, as it is built by default."""
    for name, fast in (("full", False), ("fast", True)):
        config = BuildConfig(max_seq_len=256, max_batch_size=2, max_num_tokens=64, fast_build=fast)
        build(smollm2_gguf, config, output=tmp_path / name, check=False)
    found = compare(logits(tmp_path / "full"), logits(tmp_path / "fast"))
    assert found["kl_mean"] <= MAX_KL
    assert found["top1_agreement"] > 0.9
