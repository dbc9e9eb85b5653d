"""The accuracy gate: what is measured on text, what is refused, and that nothing is written then."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pelton.builder.build import build
from pelton.builder.check import divergence, next_token_loss
from pelton.builder.gate import QualityGate, hold, read_gate
from pelton.builder.report import Evaluation
from pelton.engine.config import BuildConfig
from pelton.errors import BuildError, ConfigError
from tests.cli.text_engine import LIMITS, text_checkpoint

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
CONFIG = BuildConfig(**LIMITS)


def test_loss_and_divergence_are_torchs() -> None:
    rng = np.random.default_rng(0)
    p, q = rng.standard_normal((2, 11, 50), dtype=np.float32)
    ids = rng.integers(0, 50, 11, dtype=np.int32)
    expected = torch.nn.functional.cross_entropy(
        torch.from_numpy(p[:-1]).double(), torch.from_numpy(ids[1:]).long(), reduction="none"
    )
    np.testing.assert_allclose(next_token_loss(p, ids), expected.numpy(), rtol=1e-12)
    logs = [torch.log_softmax(torch.from_numpy(x).double(), -1) for x in (p, q)]
    kl = (logs[0].exp() * (logs[0] - logs[1])).sum(-1)
    np.testing.assert_allclose(divergence(p, q), kl.numpy(), rtol=1e-9)


def test_an_exact_engine_is_the_unquantised_model(tmp_path: Path) -> None:
    gate = QualityGate(max_kl=1e-6, max_ppl_increase=1e-5, tokens=100)
    report = build(text_checkpoint(), CONFIG, output=tmp_path / "e", gate=gate)
    assert report.quality is not None
    found = report.quality.evaluation
    assert found is not None
    assert (found.text, found.tokens) == ("pydoc_data.topics", 100)
    assert found.perplexity == pytest.approx(found.perplexity_unquantised, rel=1e-5)
    assert 100 < found.perplexity_unquantised < 1000, "random weights know nothing of 260 tokens"
    assert found.gate == "KL <= 1e-06, perplexity <= 1.00001 x the unquantised"
    stored = json.loads((tmp_path / "e" / "report.json").read_text())
    assert stored["quality"]["evaluation"]["tokens"] == 100
    line = next(row for row in report.text().splitlines() if row.startswith("  quality"))
    assert "perplexity " in line and "unquantised) over 100 tokens of pydoc_data.topics" in line


def test_beyond_the_gate_nothing_is_written(tmp_path: Path) -> None:
    """4-bit weights are the checkpoint's own; int8 activations move the predictions."""
    checkpoint = text_checkpoint("q4_1", **WIDE)
    text = "The quick brown fox jumps over the lazy dog. " * 4
    gate = QualityGate(text=text, name="prose.txt", tokens=60)
    report = build(checkpoint, CONFIG, output=tmp_path / "free", gate=gate)
    assert report.quality is not None
    found = report.quality.evaluation
    assert found is not None
    assert 1e-9 < found.kl_mean < 0.1
    assert found.gate == ""
    strict = replace(gate, max_kl=1e-9)
    message = r"KL divergence .* over 60 tokens of prose\.txt, beyond max_kl 1e-09; .*nothing is written"
    with pytest.raises(BuildError, match=message):
        build(checkpoint, CONFIG, output=tmp_path / "e", gate=strict)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["free"]


def found(kl: float, perplexity: float) -> Evaluation:
    return Evaluation(
        text="prose",
        tokens=100,
        kl_mean=kl,
        kl_max=kl,
        top1_agreement=1.0,
        perplexity=perplexity,
        perplexity_unquantised=10.0,
        gate="",
    )


@pytest.mark.parametrize(
    ("limits", "kl", "perplexity", "message"),
    [
        (
            {"max_kl": 0.01},
            0.011,
            9.0,
            r"is 0\.011 over 100 tokens of prose, beyond max_kl 0\.01",
        ),
        ({"max_kl": 0.01}, float("nan"), 9.0, "is nan over 100"),
        (
            {"max_ppl_increase": 0.02},
            0.5,
            10.3,
            r"perplexity is 10\.3 .* model's 10: 3\.00% more, beyond max_ppl_increase 0\.02",
        ),
        ({"max_ppl_increase": 0.02}, 0.0, float("inf"), "inf% more"),
    ],
)
def test_each_limit_is_held(limits: dict[str, float], kl: float, perplexity: float, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        hold(QualityGate(**limits), found(kl, perplexity))


def test_what_is_within_the_limits_passes() -> None:
    hold(QualityGate(max_kl=0.01, max_ppl_increase=0.02), found(0.01, 10.2))
    hold(QualityGate(max_ppl_increase=0.0), found(1.0, 9.5))
    hold(QualityGate(), found(1.0, 99.0))


def test_the_gate_does_not_change_the_plan(tmp_path: Path) -> None:
    build(text_checkpoint(), CONFIG, output=tmp_path / "a")
    build(text_checkpoint(), CONFIG, output=tmp_path / "b", gate=QualityGate(max_kl=1.0, tokens=20))
    for name in ("plan.json", "config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize(
    ("gate", "message"),
    [
        (QualityGate(max_kl=float("nan")), "max_kl must be a number of at least 0, not nan"),
        (QualityGate(max_ppl_increase=-0.1), r"max_ppl_increase must be a number of at least 0, not -0\.1"),
        (QualityGate(tokens=1), "eval_tokens must be at least 2, not 1"),
        (QualityGate(text="a", name="short.txt"), r"short\.txt has 1 tokens of this model"),
    ],
)
def test_gates_that_cannot_be_meant_are_refused(tmp_path: Path, gate: QualityGate, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(text_checkpoint(), CONFIG, output=tmp_path / "e", gate=gate)
    assert not (tmp_path / "e").exists()


def test_a_gate_needs_a_checked_build(tmp_path: Path) -> None:
    for options in ({"check": False}, {"dry_run": True}):
        with pytest.raises(ConfigError, match="only be measured on text where it is built and checked"):
            build(text_checkpoint(), CONFIG, output=tmp_path / "e", gate=QualityGate(), **options)


def test_the_gate_of_the_command_line(tmp_path: Path) -> None:
    assert read_gate(None, None, None, None) is None
    (tmp_path / "prose.txt").write_text("some words")
    gate = read_gate(0.01, None, tmp_path / "prose.txt", None)
    assert gate == QualityGate(max_kl=0.01, text="some words", name="prose.txt")
    with pytest.raises(ConfigError, match=r"eval_text .*missing\.txt cannot be read"):
        read_gate(None, None, tmp_path / "missing.txt", None)
    with pytest.raises(ConfigError, match="eval_tokens must be at least 2, not 0"):
        read_gate(0.01, None, None, 0)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read as text"):
        read_gate(None, None, tmp_path / "binary", None)
