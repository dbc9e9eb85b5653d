"""SmolLM2 with caches of 8 bits: nearly what it is with wide ones."""

from __future__ import annotations

from pathlib import Path

import pytest

import pelton
from pelton.builder.evaluate_engine import evaluate


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kv_dtype", "most_kl"), [("fp8", 0.0045), ("int8", 0.0025)])
def test_a_cache_of_8_bits_costs_half_a_percent_at_most(
    kv_dtype: str, most_kl: float, smollm2_gguf: Path, tmp_path: Path
) -> None:
    config = pelton.BuildConfig(activations="float32", kv_dtype=kv_dtype)
    pelton.build(smollm2_gguf, config, output=tmp_path / "e")
    found = evaluate(tmp_path / "e", against=smollm2_gguf, window=512, tokens=8192)
    assert found.kl_mean is not None
    assert found.perplexity_against is not None
    assert found.kl_mean < most_kl
    assert found.perplexity < 1.005 * found.perplexity_against
