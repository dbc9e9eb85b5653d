"""The top rungs of the ladder: engine logits against ``transformers``, for every architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pelton
from tests.checkpoint.makers import ARCHITECTURES, VOCAB_SIZE, tiny_gguf, tiny_hf_checkpoint, tiny_model
from tests.e2e import oracle
from tests.e2e.stepper import Stepper, relative_error

EXACT: dict[str, Any] = {"dtype": "float32", "activations": "float32", "kv_dtype": "float32"}
SMALL: dict[str, Any] = {"max_batch_size": 3, "max_seq_len": 96, "max_num_tokens": 80, "block_size": 8}


def check_against(model: Any, engine: Path, bound: float) -> None:
    """Prefill of three sequences at once, a chunked one among them, then decode steps past any window."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, VOCAB_SIZE, n).tolist() for n in (60, 21, 1)]
    want = [oracle.logits(model, ids) for ids in texts]
    with pelton.Session(engine, threads=2) as session:
        stepper = Stepper(session)
        got = stepper.step({0: texts[0][:25], 1: texts[1][:9], 2: texts[2]})
        assert relative_error(got[0], want[0][24:25]) < bound
        assert relative_error(got[1], want[1][8:9]) < bound
        assert relative_error(got[2], want[2][0:1]) < bound
        got = stepper.step({1: texts[1][9:15], 0: texts[0][25:26]})
        assert relative_error(got[1], want[1][14:15]) < bound
        assert relative_error(got[0], want[0][25:26]) < bound
        for i in range(26, 60):
            got = stepper.step({0: texts[0][i : i + 1]})
            assert relative_error(got[0], want[0][i : i + 1]) < bound, f"position {i}"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_an_engine_computes_what_transformers_computes(arch: str, tmp_path: Path) -> None:
    model = tiny_model(arch)
    model.set_attn_implementation("eager")
    checkpoint = tiny_hf_checkpoint(arch, tmp_path, model=model)
    engine = tmp_path / "x.engine"
    pelton.build(checkpoint, pelton.BuildConfig(**EXACT, **SMALL), output=engine)
    check_against(model, engine, 1e-4)


#: Every native block type, every architecture that GGUF files have, a quarter of the combinations.
GGUF = [
    *((arch, quant) for arch in ("llama", "gemma3") for quant in ("Q4_0", "Q4_1", "Q5_0", "Q8_0")),
    ("llama", "Q4_K"),
    ("gemma3", "Q6_K"),
    ("gpt2", "Q8_0"),
    ("qwen2", "Q5_0"),
    ("qwen3", "Q4_0"),
    ("phi3", "Q4_1"),
    ("gemma", "Q4_0"),
    ("gemma2", "Q8_0"),
]


@pytest.mark.parametrize(("arch", "quant"), GGUF)
def test_a_gguf_engine_computes_with_the_dequantised_weights(arch: str, quant: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {} if arch == "gpt2" else {"intermediate_size": 128}
    if quant.endswith("_K"):  # blocks of 256 values
        fields = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    path = tiny_gguf(arch, tmp_path, quant=quant, **fields)
    engine = tmp_path / "x.engine"
    pelton.build(path, pelton.BuildConfig(**EXACT, **SMALL), output=engine)
    check_against(oracle.load(path), engine, 1e-4)


def test_a_gguf_engine_divides_its_rope_frequencies_by_the_files_factors(tmp_path: Path) -> None:
    """Factors that no published scaling explains, as other converters may write them."""
    factors = np.linspace(1, 3, 8, dtype=np.float32)
    path = tiny_gguf("llama", tmp_path, tensors={"rope_freqs.weight": factors})
    model = oracle.load(path)
    plain = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(model.model.rotary_emb.inv_freq, plain / factors, rtol=1e-6)
    assert model.model.rotary_emb.attention_scaling == 1.0
    engine = tmp_path / "x.engine"
    pelton.build(path, pelton.BuildConfig(**EXACT, **SMALL), output=engine)
    check_against(model, engine, 1e-4)
