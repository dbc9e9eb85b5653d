"""Whole builds with passes switched off and forced: the build's own check holds their logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pelton.builder.build import build
from pelton.engine.artifact import open_engine
from pelton.engine.config import BuildConfig
from pelton.errors import ConfigError
from pelton.ir.tensors import HostTensor
from pelton.kernels.layouts import LAYOUTS
from pelton.passes import PASSES
from tests.builder.random_checkpoint import TINY_LLAMA, RandomCheckpoint

UNTIED = {**TINY_LLAMA, "tie_word_embeddings": False}
PHI3 = {**UNTIED, "architectures": ["Phi3ForCausalLM"], "rope_scaling": None, "sliding_window": None}


def built(path: Path, checkpoint: RandomCheckpoint, **passes: str) -> tuple[Any, Any]:
    config = BuildConfig(
        block_size=8,
        max_batch_size=2,
        max_num_tokens=32,
        timing=False,
        passes=passes,  # type: ignore[arg-type]
    )
    report = build(checkpoint, config, output=path / "e")
    return report, open_engine(path / "e")


@pytest.mark.parametrize(
    "name", ["fuse_qkv", "fuse_gate_mlp", "early_take_rows", "add_rms_norm", "rope_kv_write", "gemm_swiglu"]
)
def test_an_engine_without_a_pass_is_as_good(tmp_path: Path, name: str) -> None:
    report, engine = built(tmp_path, RandomCheckpoint(UNTIED), **{name: "off"})
    assert report.quality.bound.startswith("max_error")
    assert next(p.note for p in report.passes if p.name == name) == "switched off"
    assert engine.config.build.passes == {name: "off"}


@pytest.mark.parametrize(
    "name", ["add_rms_norm", "gemm_swiglu", "explicit_quantise", "move_quantise", "norm_quantise"]
)
def test_a_quantised_engine_without_a_pass_has_a_kernel_for_every_instruction(
    tmp_path: Path, name: str
) -> None:
    _, engine = built(tmp_path, RandomCheckpoint(UNTIED, quant="q4_0"), **{name: "off"})
    assert [i.op for i in engine.plan.instructions if not i.tactics] == []


def test_an_engine_without_any_pass_is_as_good(tmp_path: Path) -> None:
    report, engine = built(tmp_path, RandomCheckpoint(UNTIED), **{p.name: "off" for p in PASSES})
    assert all(p.changed == 0 for p in report.passes)
    ops = {i.op for i in engine.plan.instructions}
    assert {"rope", "kv_write", "gated_activation", "add", "rms_norm"} <= ops
    assert not {"rope_kv_write", "linear_gated", "add_rms_norm"} & ops


def test_every_norm_folded_by_force(tmp_path: Path) -> None:
    checkpoint = RandomCheckpoint(UNTIED)
    report, engine = built(tmp_path, checkpoint, fold_norm_weight="force")
    assert next(p.changed for p in report.passes if p.name == "fold_norm_weight") == 5
    assert report.quality.max_error < 1e-5
    meta = engine.weights.meta["lm_head.weight"]
    stored = LAYOUTS[meta.layout].unpack(engine.weights[meta.name], meta.quant, meta.shape)
    gain = checkpoint.read("model.norm.weight").data
    np.testing.assert_allclose(stored, checkpoint.read("lm_head.weight").data * gain, rtol=1e-6)
    # All norms' weights are ones now, and cse keeps one of them.
    ones = [b for b in engine.plan.buffers if b.kind == "weight" and b.shape == (64,)]
    assert len(ones) == 1


def test_packed_projections_apart_by_force(tmp_path: Path) -> None:
    report, engine = built(tmp_path, RandomCheckpoint(PHI3), unfuse_qkv_gemm="force")
    names = {b.name for b in engine.plan.buffers if b.kind == "weight"}
    assert "model.layers.1.self_attn.v_proj.weight" in names
    assert not any("qkv_proj" in name for name in names)
    assert report.quality.max_error < 1e-5


def test_what_cannot_be_forced_fails_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"share_embedding=force: lm_head: lm_head differs \(max 0\.\d+ in"):
        built(tmp_path, RandomCheckpoint(UNTIED), share_embedding="force")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="unfuse_qkv_gemm and fuse_qkv undo each other"):
        built(tmp_path, RandomCheckpoint(PHI3), unfuse_qkv_gemm="force", fuse_qkv="force")


class Twins(RandomCheckpoint):
    """The head holds the table's values."""

    def read(self, name: str) -> HostTensor:
        return super().read("model.embed_tokens.weight" if name == "lm_head.weight" else name)


@pytest.mark.parametrize("quant", ["float32", "bfloat16", "q4_0"])
def test_a_head_that_is_the_table_is_stored_once(tmp_path: Path, quant: str) -> None:
    report, engine = built(tmp_path, Twins(UNTIED, quant=quant))
    assert next(p.changed for p in report.passes if p.name == "share_embedding") == 1
    tables = [b.name for b in engine.plan.buffers if b.kind == "weight" and b.shape == (101, 64)]
    assert tables == ["model.embed_tokens.weight"]
    assert report.quality is not None


def test_int8_inputs_are_quantised_by_norms(tmp_path: Path) -> None:
    checkpoint = RandomCheckpoint(UNTIED, quant="q4_0")
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    with_it, engine = built(tmp_path / "a", checkpoint)
    without, plain = built(tmp_path / "b", checkpoint, explicit_quantise="off")
    assert {"rms_norm_q8", "add_rms_norm_q8", "linear_q8", "linear_gated_q8"} <= {
        i.op for i in engine.plan.instructions
    }
    assert not any("q8" in i.op for i in plain.plan.instructions)
    # The same rounding, wherever it is done.
    assert with_it.quality.max_error == pytest.approx(without.quality.max_error, rel=1e-3)
