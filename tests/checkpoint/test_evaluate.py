"""Recipes evaluated on host tensors."""

from __future__ import annotations

import numpy as np
import pytest

from pelton.errors import CheckpointError
from pelton.ir.block_encoder import quantize
from pelton.ir.blocks import dequantize
from pelton.ir.evaluate import evaluate, infer_quant, infer_shape
from pelton.ir.recipe import AddScalar, Concat, PermuteRows, Recipe, Rows, Source, Transpose, add_scalar
from pelton.ir.tensors import HostTensor, f32_to_bf16

RNG = np.random.default_rng(0)
DENSE = {name: RNG.standard_normal((16, 64)).astype(np.float32) for name in "abc"}
TENSORS = {name: HostTensor("float32", (16, 64), data) for name, data in DENSE.items()}
TENSORS |= {f"{name}.q4_1": quantize(data, "q4_1") for name, data in DENSE.items()}
TENSORS |= {f"{name}.q8_0": quantize(data, "q8_0") for name, data in DENSE.items()}
TENSORS["half"] = HostTensor("float16", (16, 64), DENSE["a"].astype(np.float16))
TENSORS["brain"] = HostTensor("bfloat16", (16, 64), f32_to_bf16(DENSE["a"]))
TENSORS["norm"] = HostTensor("bfloat16", (64,), f32_to_bf16(DENSE["a"][0]))

ROW_RECIPES = [
    lambda s: Concat((Source("a" + s), Source("b" + s), Source("c" + s))),
    lambda s: Rows(Source("a" + s), 3, 9),
    lambda s: PermuteRows(Source("a" + s), heads=2, inner=2),
    lambda s: Concat((PermuteRows(Source("a" + s), 4, 2), Rows(Source("b" + s), 0, 1))),
]


@pytest.mark.parametrize("make", ROW_RECIPES)
@pytest.mark.parametrize("suffix", ["", ".q4_1", ".q8_0"])
def test_row_recipes_commute_with_dequantising(make, suffix: str) -> None:
    """Working on block rows and then dequantising is the same as the other way round, exactly."""
    recipe: Recipe = make(suffix)
    dense = {k: HostTensor("float32", t.shape, dequantize(t)) for k, t in TENSORS.items()}
    on_blocks = evaluate(recipe, TENSORS.__getitem__)
    on_values = evaluate(recipe, dense.__getitem__)
    assert on_blocks.quant == infer_quant(recipe, TENSORS)
    assert on_blocks.shape == on_values.shape == infer_shape(recipe, TENSORS)
    np.testing.assert_array_equal(dequantize(on_blocks), on_values.data)


def test_permute_rows_undoes_llama_cpps_permutation() -> None:
    """llama.cpp's converter splits each head's halves into (2, head_dim/2) and swaps them."""
    heads, weight = 2, DENSE["a"]
    stored = weight.reshape(heads, 2, 16 // heads // 2, 64).swapaxes(1, 2).reshape(16, 64)
    out = evaluate(
        PermuteRows(Source("x"), heads=heads, inner=2), lambda _: HostTensor("float32", (16, 64), stored)
    )
    np.testing.assert_array_equal(out.data, weight)


@pytest.mark.parametrize("name", ["a", "half", "brain"])
def test_transpose_keeps_type_and_bits(name: str) -> None:
    out = evaluate(Transpose(Source(name)), TENSORS.__getitem__)
    assert (out.quant, out.shape) == (TENSORS[name].quant, (64, 16))
    np.testing.assert_array_equal(out.data, TENSORS[name].data.T)
    assert infer_quant(Transpose(Source(name)), TENSORS) == TENSORS[name].quant


def test_add_scalar_gives_float32_and_opposite_ones_cancel() -> None:
    recipe = AddScalar(Source("norm"), 1.0)
    out = evaluate(recipe, TENSORS.__getitem__)
    assert out.quant == "float32" == infer_quant(recipe, TENSORS)
    np.testing.assert_array_equal(out.data, dequantize(TENSORS["norm"]) + np.float32(1))
    assert add_scalar(AddScalar(Source("norm"), -1.0), 1.0) == Source("norm")


def test_a_source_is_not_copied() -> None:
    assert evaluate(Source("a"), TENSORS.__getitem__) is TENSORS["a"]


@pytest.mark.parametrize(
    ("recipe", "verb"),
    [(Transpose(Source("a.q4_1")), "transposed"), (AddScalar(Source("a.q4_1"), 1.0), "added to")],
)
def test_value_recipes_on_blocks_are_refused_by_name(recipe: Recipe, verb: str) -> None:
    message = f"tensor a.q4_1 is stored as q4_1 blocks, which cannot be {verb} without loss"
    with pytest.raises(CheckpointError, match=message):
        evaluate(recipe, TENSORS.__getitem__)
    with pytest.raises(CheckpointError, match=message):
        infer_quant(recipe, TENSORS)


def test_concat_of_different_types_is_our_own_bug() -> None:
    mixed = Concat((Source("a"), Source("b.q4_1")))
    with pytest.raises(AssertionError, match="different value types"):
        evaluate(mixed, TENSORS.__getitem__)
    with pytest.raises(AssertionError, match="different value types"):
        infer_quant(mixed, TENSORS)
