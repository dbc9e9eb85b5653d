"""Weights are made in pieces, and the pieces are the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pelton.builder import eager, weights
from pelton.builder.build import build
from pelton.builder.quantized_view import round_in_stream
from pelton.builder.target import block_types
from pelton.builder.weights import WeightSpec, exact_types, pack_weight, stored_quant, write_weights
from pelton.dtypes import NATIVE_BLOCK_TYPES
from pelton.engine.artifact import open_engine
from pelton.engine.config import BuildConfig
from pelton.engine.shards import Shards
from pelton.errors import CheckpointError, ConfigError
from pelton.ir.block_encoder import quantize
from pelton.ir.evaluate import evaluate
from pelton.ir.recipe import AddScalar, Concat, Recipe, Rows, Scale, ScaleColumns, Source
from pelton.ir.tensors import HostTensor, f32_to_bf16
from pelton.kernels.layouts import LAYOUTS
from pelton.quant.config import QuantConfig
from tests.builder.random_checkpoint import TINY_LLAMA, RandomCheckpoint

VALUES = np.random.default_rng(0).standard_normal((83, 256), dtype=np.float32)
TENSORS = {
    "float32": HostTensor("float32", VALUES.shape, VALUES),
    "bfloat16": HostTensor("bfloat16", VALUES.shape, f32_to_bf16(VALUES)),
    **{quant: quantize(VALUES, quant) for quant in NATIVE_BLOCK_TYPES},
}


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_CHUNK", 20 * 256)
    monkeypatch.setattr(eager, "_PIECE", 7 * 64)


@pytest.mark.parametrize("layout", ["rows", "x16"])
@pytest.mark.parametrize("quant", TENSORS)
def test_pieces_are_the_packed_weight(layout: str, quant: str) -> None:
    spec = WeightSpec(name="w", source=Source("w"), quant=quant, layout=layout, shape=VALUES.shape)
    makers, note = pack_weight(spec, lambda name: TENSORS[quant])
    pieces = [make() for make in makers]
    assert len(pieces) > 4 and note == ""
    np.testing.assert_array_equal(np.concatenate(pieces), LAYOUTS[layout].pack(TENSORS[quant]))


@pytest.mark.parametrize("layout", ["mma16", "rows8"])
def test_pieces_are_joined_to_what_an_engine_stores(layout: str, tmp_path: Path) -> None:
    specs = [
        WeightSpec(name="w", source=Source("w"), quant="int8_row", layout=layout, shape=VALUES.shape),
        WeightSpec(name="b", source=VALUES[0], quant="float32", layout="rows", shape=(256,)),
    ]
    tensor = quantize(VALUES, "int8_row")
    files, _ = write_weights(tmp_path / "weights", specs, lambda name: tensor, lambda *_: None)
    stored = Shards(path for path, _, _ in files)
    np.testing.assert_array_equal(stored["w"], LAYOUTS[layout].pack(tensor))


@pytest.mark.parametrize(
    "recipe",
    [
        Source("w"),
        Rows(Source("w"), 0, 83),
        Scale(Source("w"), 3.0),
        ScaleColumns(Source("w"), Source("by")),
        AddScalar(Scale(Source("w"), 2.0), 1.0),
    ],
    ids=lambda recipe: type(recipe).__name__,
)
def test_only_the_rows_of_a_piece_are_made(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"w": TENSORS["bfloat16"], "by": HostTensor("float32", (256,), VALUES[0])}
    whole = evaluate(recipe, tensors.__getitem__)
    made: list[int] = []

    def spy(part: Recipe, read: Callable[[str], HostTensor]) -> HostTensor:
        tensor = evaluate(part, read)
        made.append(tensor.shape[0])
        return tensor

    monkeypatch.setattr(weights, "evaluate", spy)
    spec = WeightSpec(name="w", source=recipe, quant="float32", layout="x16", shape=VALUES.shape)
    makers, _ = pack_weight(spec, tensors.__getitem__)
    packed = np.concatenate([make() for make in makers])
    want = weights.convert(whole, "float32")
    np.testing.assert_array_equal(packed, LAYOUTS["x16"].pack(want))
    assert max(made) == 16 and sum(made) == 83


def test_a_value_that_is_not_finite_is_found_in_any_piece_and_named_by_its_tensor() -> None:
    bad = VALUES.copy()
    bad[80, 3] = np.nan
    tensors = {"good": TENSORS["float32"], "bad": HostTensor("float32", bad.shape, bad)}
    recipe = Concat((Source("good"), Rows(Source("bad"), 16, 83)))
    spec = WeightSpec(name="w", source=recipe, quant="bfloat16", layout="x16", shape=(150, 256))
    makers, _ = pack_weight(spec, tensors.__getitem__)
    with pytest.raises(CheckpointError, match="tensor bad has 1 NaN or infinite values"):
        [make() for make in makers]


def test_float16_overflow_is_found_in_any_piece() -> None:
    large = VALUES.copy()
    large[70, 0] = 1e6
    spec = WeightSpec(name="w", source=Source("w"), quant="float16", layout="rows", shape=large.shape)
    makers, _ = pack_weight(spec, lambda name: HostTensor("float32", large.shape, large))
    with pytest.raises(ConfigError, match="w has values beyond float16's range"):
        [make() for make in makers]


def test_an_engine_of_pieces_is_checked_against_a_reference_of_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary and widths that no piece divides; the same bytes as made whole."""
    config = BuildConfig(max_batch_size=2, max_seq_len=48, max_num_tokens=24)
    report = build(RandomCheckpoint(TINY_LLAMA), config, output=tmp_path / "pieces")
    assert report.quality is not None and report.quality.max_error < 1e-5
    monkeypatch.setattr(weights, "_CHUNK", 1 << 22)
    build(RandomCheckpoint(TINY_LLAMA), config, output=tmp_path / "whole")
    assert open_engine(tmp_path / "pieces").engine_id == open_engine(tmp_path / "whole").engine_id


@pytest.mark.parametrize(
    ("quant", "target", "stored"),
    [
        ("q4_0", "cpu", "q4_0"),
        ("q3_k", "cpu", "q8_0"),
        ("mxfp4", "cpu", "q8_0"),
        ("q4_0", "sm_90", "int4_g32"),
        ("q4_1", "sm_90", "q4_1"),
        ("q8_0", "sm_90", "int8_g32"),
        ("mxfp4", "sm_90", "mxfp4"),
        ("int4_g128", "sm_90", "int4_g128"),
        ("float16", "cpu", "bfloat16"),
    ],
)
def test_what_a_target_stores(quant: str, target: str, stored: str) -> None:
    assert stored_quant(quant, (64, 256), "bfloat16", block_types(target)) == stored
    assert stored_quant("float16", (64,), "bfloat16", block_types(target)) == "float32"


def test_a_build_in_float32_all_through_rounds_no_block_type() -> None:
    native = block_types("cpu")
    assert stored_quant("nvfp4", (64, 256), "float32", native, exact=True) == "float32"
    assert stored_quant("q4_0", (64, 256), "float32", native, exact=True) == "q4_0"
    assert exact_types(BuildConfig(dtype="float32", activations="float32"))
    assert not exact_types(BuildConfig(dtype="bfloat16", activations="float32"))
    assert not exact_types(BuildConfig(dtype="float32", activations="int8"))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("quant", ["int8_row", "fp8_row", "fp8_g128", "nvfp4", "int4_g32"])
def test_widths_that_32_does_not_divide_are_dense_on_cpus(quant: str, exact: bool, tmp_path: Path) -> None:
    """Its kernels read 32 columns at a time; the build's own check holds the engine to the reference."""
    base = RandomCheckpoint({**TINY_LLAMA, "hidden_size": 48, "intermediate_size": 100, "head_dim": 32})
    view = round_in_stream(base, QuantConfig(weights=quant, overrides={"model.embed_tokens": quant}))
    settings: dict[str, Any] = {"dtype": "float32", "activations": "float32"} if exact else {"timing": False}
    build(view, BuildConfig(**settings), output=tmp_path / "e")
    engine = open_engine(tmp_path / "e")
    types = {b.name: b.quant for b in engine.plan.buffers if b.kind == "weight"}
    dense = engine.config.build.dtype
    assert types["model.embed_tokens.weight"] == types["model.layers.0.mlp.down_proj.weight"] == dense
    kept = quant if quant in block_types("cpu") else dense if exact else "q8_0"
    assert types["model.layers.0.self_attn.o_proj.weight"] == kept, "128 columns"
