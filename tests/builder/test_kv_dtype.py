"""Engines whose KV cache has 8 bits: twice the blocks, scales as measured, answers near the exact ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pelton.builder import check
from pelton.builder.build import build
from pelton.builder.clock import Clock
from pelton.builder.compile import compile_model
from pelton.builder.evaluation import eager_config
from pelton.builder.kv_calibration import see
from pelton.builder.quantized_view import draft
from pelton.builder.refit import refit
from pelton.builder.write_quantized import quantize
from pelton.engine.artifact import open_engine
from pelton.engine.config import BuildConfig
from pelton.engine.kv_cache import block_bytes
from pelton.engine.session import Session
from pelton.errors import BuildError, ConfigError
from pelton.ir import kv_codes
from pelton.models.checkpoint import open_checkpoint
from pelton.quant.config import QuantConfig
from tests.builder.random_checkpoint import TINY_LLAMA, RandomCheckpoint
from tests.builder.test_quantize import text_checkpoint
from tests.e2e.stepper import Stepper, relative_error

KINDS = {"int8": "int8", "fp8": "float8_e4m3fn"}


@pytest.mark.parametrize("asked", KINDS)
def test_an_engine_with_codes_in_its_cache(asked: str, tmp_path: Path) -> None:
    checkpoint = RandomCheckpoint(TINY_LLAMA)
    exact = build(checkpoint, BuildConfig(kv_dtype="float16"), output=tmp_path / "f16")
    report = build(checkpoint, BuildConfig(kv_dtype=asked), output=tmp_path / "codes")
    assert report.quality is not None and exact.quality is not None
    assert exact.quality.kl_mean < report.quality.kl_mean < 0.02
    engine = open_engine(tmp_path / "codes")
    build_config = engine.config.build
    assert build_config.kv_dtype == KINDS[asked]
    assert build_config.block_size is not None
    (group,) = engine.config.model.kv_groups
    halves = block_bytes(group, build_config.block_size, "float16")
    assert 2 * block_bytes(group, build_config.block_size, KINDS[asked]) == halves
    shards = engine.weights
    for layer in range(TINY_LLAMA["num_hidden_layers"]):
        k, v = (shards[f"{kind}_scale.{layer}"][:4].view(np.float32)[0] for kind in "kv")
        assert k > 0
        assert v > 0
        assert k != v
        if asked == "fp8":
            assert shards[f"k_shift.{layer}"].view(np.float32).any()
    logits = []
    for runner in ("native", "reference"):
        with Session(tmp_path / "codes", runner=runner, kv_blocks=8) as session:  # type: ignore[arg-type]
            stepper = Stepper(session)
            stepper.step({0: [5, 9, 11], 1: [7]})
            logits.append(stepper.step({0: [3], 1: [2]}))
    for sequence in (0, 1):
        assert relative_error(logits[0][sequence], logits[1][sequence]) < 0.05


@pytest.mark.parametrize("target", ["cpu", "sm_89", "sm_90"])
@pytest.mark.parametrize("asked", KINDS)
def test_keys_of_fp8_are_stored_less_a_vector_on_every_target(asked: str, target: str) -> None:
    shape = TINY_LLAMA | {"hidden_size": 256, "num_key_value_heads": 4}
    dtype = None if target == "cpu" else "bfloat16"
    wanted = BuildConfig(target=target, dtype=dtype, kv_dtype=asked, timing=False)
    plan = compile_model(RandomCheckpoint(shape), wanted, Clock(lambda *_: None), may_measure=False).plan
    writers = [call for call in plan.instructions if "kv_write" in call.op or "rope_paged" in call.op]
    assert len(writers) == shape["num_hidden_layers"]
    for layer, call in enumerate(writers):
        names = {plan.operands[i].name for i in call.inputs if i >= 0}
        found = {f"k_shift.{layer}", f"k_queries.{layer}"} & names
        assert len(found) == (2 if asked == "fp8" else 0)
        if target == "sm_90":
            assert all("hopper8" in choice.tactic for choice in call.tactics)


def test_an_unknown_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_dtype.*int4.*fp8"):
        build(RandomCheckpoint(TINY_LLAMA), BuildConfig(kv_dtype="int4"), output=tmp_path / "x")


def test_a_type_too_coarse_for_the_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "MAX_KL", 0.0)
    with pytest.raises(BuildError, match=r"cache of int8 is too coarse for this model.*kv_dtype fp8"):
        build(RandomCheckpoint(TINY_LLAMA), BuildConfig(kv_dtype="int8"), output=tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_value_far_out_does_not_make_all_steps_coarse() -> None:
    values = torch.randn(2, 1000, 100, generator=torch.Generator().manual_seed(0))
    plain = kv_codes.scale_of(values, torch.int8)
    values[1, 0, 0] = 40.0
    scale = kv_codes.scale_of(values, torch.int8)
    assert scale[0] == plain[0]
    assert scale[1] < 0.9 * 40.0 / 127
    assert kv_codes.scale_of(torch.zeros(1, 8, 2), torch.int8) == 1
    assert kv_codes.scale_of(torch.zeros(1, 8, 2), torch.int8, relative=True) == 1
    assert kv_codes.scale_of(values, torch.float8_e4m3fn)[1] == 2 * 40.0 / 448


@pytest.mark.parametrize(
    ("asked", "found"), [(None, "float8_e4m3fn"), ("float16", "float16"), ("int8", "int8")]
)
def test_a_recipe_names_the_type_of_caches(asked: str | None, found: str, tmp_path: Path) -> None:
    build(RandomCheckpoint(TINY_LLAMA), BuildConfig(quant="fp8-kv", kv_dtype=asked), output=tmp_path / "e")
    assert open_engine(tmp_path / "e").config.build.kv_dtype == found


@pytest.mark.parametrize(("kv", "largest"), [("int8", 127.0), ("fp8", 448.0)])
def test_a_written_checkpoint_has_scales_that_its_engine_takes(
    kv: Any, largest: float, tmp_path: Path
) -> None:
    base = text_checkpoint()
    quantize(base, QuantConfig(weights="int8_row", kv=kv), tmp_path / "small")
    checkpoint = open_checkpoint(tmp_path / "small")
    scales = checkpoint.kv_quant()
    assert scales is not None
    assert scales.dtype == kv
    model = draft(checkpoint, max_seq_len=64)
    seen = see(checkpoint, model, eager_config(checkpoint, 64).build)
    for k, (scale,) in zip(seen.k, scales.k_scales, strict=True):
        assert 0.1 < float(k.abs().max()) / (largest * scale) < 6
    report = build(checkpoint, BuildConfig(kv_dtype=kv), output=tmp_path / "e")
    assert "scales of KV caches are the checkpoint's" in report.notes
    shards = open_engine(tmp_path / "e").weights
    for layer, (scale,) in enumerate(scales.k_scales):
        assert shards[f"k_scale.{layer}"][:4].view(np.float32)[0] == np.float32(scale)


def test_formats_without_caches_are_refused(tmp_path: Path) -> None:
    config = QuantConfig(weights="int4_g32", kv="int8")
    with pytest.raises(
        ConfigError, match=r"gptq checkpoints have no types of KV caches .*compressed-tensors"
    ):
        quantize(text_checkpoint(), config, tmp_path / "x", fmt="gptq")


@pytest.mark.parametrize("asked", KINDS)
@pytest.mark.parametrize("wide", ["float16", "bfloat16"])
def test_the_same_memory_holds_twice_the_blocks(asked: str, wide: str, tmp_path: Path) -> None:
    """Counted in what a session allocates, scales and all."""
    from pelton.engine.kv_cache import allocate, choose_num_blocks

    found = {}
    for kv_dtype in (asked, wide):
        limits = BuildConfig(kv_dtype=kv_dtype, max_batch_size=64, timing=False)
        build(RandomCheckpoint(TINY_LLAMA), limits, output=tmp_path / kv_dtype, check=False)
        config = open_engine(tmp_path / kv_dtype).config
        blocks = choose_num_blocks(config, free=400_000)
        caches = allocate(config, blocks)
        nbytes = sum(array.nbytes for by_layer in (caches.k, caches.v) for array in by_layer.values())
        found[kv_dtype] = sum(blocks), nbytes
    (many, small), (few, large) = found[asked], found[wide]
    assert many in (2 * few, 2 * few + 1)
    assert few > 10
    assert small <= 400_000
    assert large <= 400_000


def test_small_values_count_as_much_as_large_ones() -> None:
    """A tenth of the tokens have values of a hundredth: they get more than a code or two."""
    values = torch.randn(1, 1000, 64, generator=torch.Generator().manual_seed(0))
    values[:, ::10] /= 100
    errors = []
    for relative in (False, True):
        scale = kv_codes.scale_of(values, torch.int8, relative=relative)
        kept = kv_codes.decode(kv_codes.encode(values.transpose(0, 1), torch.int8, scale), scale).transpose(
            0, 1
        )
        errors.append(((kept - values).square().sum(2) / values.square().sum(2)).mean())
    assert errors[1] < errors[0] / 1.5


def test_new_weights_get_the_factors_of_the_keys_too(tmp_path: Path) -> None:
    """A refit makes every weight by its recipe again, so queries and keys still fit each other."""
    checkpoint = RandomCheckpoint(TINY_LLAMA)
    build(checkpoint, BuildConfig(kv_dtype="int8"), output=tmp_path / "e")
    before = open_engine(tmp_path / "e")
    assert "ScaleRows" in (tmp_path / "e" / "weights.json").read_text()
    refit(tmp_path / "e", checkpoint)
    after = open_engine(tmp_path / "e")
    for name in before.weights:
        np.testing.assert_array_equal(before.weights[name], after.weights[name], err_msg=name)
