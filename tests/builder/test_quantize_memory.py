"""The memory of quantising is bounded by a layer, not by the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.builder.test_streaming import EIGHT_BILLION, LLAMA
from tests.serving.fake_engine import VOCAB_SIZE

SHAPE: dict[str, Any] = LLAMA | {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
#: A layer's weights in float32.
LAYER = 4 * (3 * 1536 * 512 + 3 * 512 * 512)


def memory(folder: Path, layers: int, recipe: str, shape: dict[str, Any] = SHAPE, length: int = 64) -> int:
    """Bytes above what the process had before."""
    folder.mkdir()
    config = json.dumps(shape | {"num_hidden_layers": layers})
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    env |= {f"MALLOC_{name}_THRESHOLD_": str(1 << 20) for name in ("MMAP", "TRIM")}  # what is freed goes back
    command = [sys.executable, "-m", "tests.builder.quantising_run", str(folder), config, recipe, str(length)]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["layers"] == layers
    return int(found["took"])


@pytest.mark.parametrize("recipe", ["int4", "awq-gptq-int4"])
def test_six_more_layers_take_no_more_memory(recipe: str, tmp_path: Path) -> None:
    """What the allocators keep differs from run to run by half a layer."""
    few, many = memory(tmp_path / "a", 2, recipe), memory(tmp_path / "b", 8, recipe)
    assert many < few + LAYER, f"{few / LAYER:.1f} and {many / LAYER:.1f} layers"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", ["gptq-int4", "awq-int4", "smoothquant"])
def test_a_layer_of_eight_billions_shape(recipe: str, tmp_path: Path) -> None:
    """A decoder layer of Llama-3.1-8B's shape with 512 calibration tokens (some minutes).

    The layer in float32, the Gram matrices of its four inputs, and one weight more (2.13 GB); and 0.15 GB for
    hidden states, codes, pieces of products and what the allocators keep (measured: 2.22, 2.15, 2.15 GB).
    """
    shape = EIGHT_BILLION | {"vocab_size": VOCAB_SIZE, "tie_word_embeddings": True}
    took = memory(tmp_path / "m", 1, recipe, shape, length=128)
    hidden, wide, kv = 4096, 14336, 1024
    layer = 4 * (3 * hidden * wide + 2 * hidden * hidden + 2 * kv * hidden)
    grams = 4 * (3 * hidden**2 + wide**2)
    assert took < layer + grams + 4 * hidden * wide + 150_000_000, f"{took / 1e9:.2f} GB"
