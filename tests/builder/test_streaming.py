"""A build's memory is bounded by a layer, not by the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
#: 8 layers of 33 MB.
SMALL = LLAMA | {
    "vocab_size": 2000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
#: Llama-3.2-1B's shape.
ONE_BILLION = LLAMA | {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
MB = 1_000_000


def build(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    paths = ["src", ".", *filter(None, [os.environ.get("PYTHONPATH")])]
    result = subprocess.run(
        [sys.executable, "-m", "tests.builder.streaming_build", str(folder), json.dumps(config)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
    )
    figures: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return figures


def test_streaming_and_checking_take_a_layer_of_memory(tmp_path: Path) -> None:
    figures = build(tmp_path, SMALL)
    layer = 4 * (3 * 4096 * 1024 + 3 * 1024 * 1024)  # float32, in the reference model
    taken = figures["peak"] - figures["at_weights"]
    assert figures["weights"] > 250 * MB
    assert taken < layer + 80 * MB < figures["weights"]
    assert figures["max_error"] < 2e-3


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_1b_shaped_build_stays_below_its_largest_layer_and_a_gigabyte(tmp_path: Path) -> None:
    figures = build(tmp_path, ONE_BILLION)
    largest = 2 * 128256 * 2048  # the embedding table, bfloat16
    assert figures["weights"] > 2400 * MB
    assert figures["peak"] - figures["after_import_torch"] <= largest + 1000 * MB
