"""A build's memory is bounded by a layer, not by the model."""

from __future__ import annotations

import json
import os
import shutil
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
#: Llama-3.1-8B's shape: 16 GB.
EIGHT_BILLION = LLAMA | {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
MB = 1_000_000


def layer_bytes(config: dict[str, Any]) -> int:
    """A decoder layer as the checkpoint stores it, bfloat16."""
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    kv = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    return 2 * (3 * mlp * hidden + 2 * hidden * hidden + 2 * kv * hidden)


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


def test_streaming_and_checking_take_less_than_half_a_small_model(tmp_path: Path) -> None:
    figures = build(tmp_path, SMALL)
    taken = figures["peak"] - figures["at_weights"]
    # A layer is 33 MB; pieces of a fixed size are most of it.
    assert taken < layer_bytes(SMALL) + 110 * MB < 150 * MB
    assert figures["weights"] > 250 * MB
    assert figures["max_error"] < 2e-3


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("config", [ONE_BILLION, EIGHT_BILLION], ids=["1b", "8b"])
def test_a_large_build_stays_below_its_largest_layer_and_a_gigabyte(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    """All anonymous memory of the process: Python, torch, and the check."""
    if shutil.disk_usage(tmp_path).free < 3 * layer_bytes(config) * config["num_hidden_layers"]:
        pytest.skip("not enough disk for the checkpoint and its engine")
    try:
        figures = build(tmp_path, config)
    finally:
        for made in tmp_path.iterdir():
            shutil.rmtree(made)
    assert figures["weights"] > layer_bytes(config) * config["num_hidden_layers"]
    assert figures["peak"] <= layer_bytes(config) + 1000 * MB
    assert figures["max_error"] < 2e-3
