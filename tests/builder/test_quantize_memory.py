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
def test_three_more_layers_take_no_more_memory(recipe: str, tmp_path: Path) -> None:
    few, many = memory(tmp_path / "a", 2, recipe), memory(tmp_path / "b", 5, recipe)
    assert many < few + LAYER / 2, f"{few / LAYER:.1f} and {many / LAYER:.1f} layers"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_layer_of_eight_billions_shape(tmp_path: Path) -> None:
    """GPTQ of a decoder layer of Llama-3.1-8B's shape with 512 calibration tokens (some minutes).

    Its peak is while ``down_proj`` is rounded: the layer in float32, the Gram matrix of its 14336 columns,
    the factor made of it, the weight once more, in the order of its columns (2.75 GB); and half a GB for the
    codes of all products, hidden states, strips of products and what the allocators keep (0.42 measured).
    """
    shape = EIGHT_BILLION | {"vocab_size": VOCAB_SIZE, "tie_word_embeddings": True}
    took = memory(tmp_path / "m", 1, "gptq-int4", shape, length=128)
    hidden, wide, kv = 4096, 14336, 1024
    layer = 4 * (3 * hidden * wide + 2 * hidden * hidden + 2 * kv * hidden)
    assert took < layer + 2 * 4 * wide**2 + 4 * hidden * wide + 500_000_000, f"{took / 1e9:.2f} GB"
