"""Engines with quantised weights on a GPU, against those weights dequantised: within the bound of builds."""

from __future__ import annotations

from pathlib import Path

import pytest

from pelton.builder.build import build
from pelton.engine.artifact import open_engine
from pelton.engine.config import BuildConfig
from tests.builder.random_checkpoint import TINY_LLAMA, RandomCheckpoint

pytestmark = pytest.mark.gpu
#: Whole units of columns, so that the kernels for sm_90 alone take part.
CONFIG = TINY_LLAMA | {
    "hidden_size": 256,
    "intermediate_size": 384,
    "vocab_size": 500,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    ("quant", "activations"),
    [
        ("int4_g128", None),
        pytest.param("int4_g32", None, marks=pytest.mark.slow),
        pytest.param("int8_g64", None, marks=pytest.mark.slow),
        pytest.param("fp8_row", None, marks=pytest.mark.slow),
        ("fp8_row", "fp8"),
        pytest.param("int8_row", "int8", marks=pytest.mark.slow),
        pytest.param("fp8_g128", None, marks=pytest.mark.slow),
        ("fp8_g128", "fp8"),
        pytest.param("nf4_g64", None, marks=pytest.mark.slow),
        pytest.param("nvfp4", None, marks=pytest.mark.slow),
        pytest.param("q4_0", None, marks=pytest.mark.slow),
        pytest.param("q4_1", None, marks=pytest.mark.slow),
        pytest.param("q5_0", None, marks=pytest.mark.slow),
        pytest.param("q5_1", None, marks=pytest.mark.slow),
        pytest.param("q2_k", None, marks=pytest.mark.slow),
        pytest.param("q3_k", None, marks=pytest.mark.slow),
        pytest.param("q4_k", None, marks=pytest.mark.slow),
        pytest.param("q5_k", None, marks=pytest.mark.slow),
        pytest.param("q6_k", None, marks=pytest.mark.slow),
    ],
)
def test_an_engine_computes_with_its_quantised_weights(
    quant: str, activations: str | None, tmp_path: Path
) -> None:
    config = BuildConfig(target="cuda", dtype="bfloat16", max_batch_size=40, activations=activations)
    wide = {"intermediate_size": 512} if quant.endswith("_k") else {}
    report = build(RandomCheckpoint(CONFIG | wide, quant=quant), config, output=tmp_path / "tiny.engine")
    assert report.quality is not None
    assert report.quality.runner == "cuda"
    plan = open_engine(tmp_path / "tiny.engine").plan
    stored = {b.quant for b in plan.buffers if b.layout in ("mma16", "rows8")}
    assert stored == {"int4_g32" if quant == "q4_0" else quant}


def test_an_engine_computes_with_the_types_of_a_mixed_file(tmp_path: Path) -> None:
    """As llama.cpp writes Q4_K_M: values and the head in 6 bits, so that q, k and v are apart; what has no
    whole blocks of 256 columns in another type."""

    def quant_of(name: str) -> str:
        six = "v_proj" in name or "lm_head" in name or "embed" in name
        return "q5_0" if "down_proj" in name else "q6_k" if six else "q4_k"

    config = BuildConfig(target="cuda", dtype="bfloat16", max_batch_size=40)
    report = build(RandomCheckpoint(CONFIG, quant=quant_of), config, output=tmp_path / "tiny.engine")
    assert report.quality is not None
    assert report.quality.runner == "cuda"
    plan = open_engine(tmp_path / "tiny.engine").plan
    assert {b.quant for b in plan.buffers if b.layout == "mma16"} == {"q4_k", "q5_0", "q6_k"}
