"""The memory of quantising is bounded by a layer, not by the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.builder.test_streaming import LLAMA
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


def memory(folder: Path, layers: int, recipe: str) -> int:
    """Bytes above what the process had before."""
    folder.mkdir()
    config = json.dumps(SHAPE | {"num_hidden_layers": layers})
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.builder.quantising_run", str(folder), config, recipe]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["layers"] == layers
    return int(found["took"])


@pytest.mark.parametrize("recipe", ["int4", "awq-gptq-int4"])
def test_six_more_layers_take_no_more_memory(recipe: str, tmp_path: Path) -> None:
    few, many = memory(tmp_path / "a", 2, recipe), memory(tmp_path / "b", 8, recipe)
    assert many < few + LAYER, f"{few / LAYER:.1f} and {many / LAYER:.1f} layers"
