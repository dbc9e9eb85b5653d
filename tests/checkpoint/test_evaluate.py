"""Recipes evaluated on host tensors."""

from __future__ import annotations

import numpy as np
import pytest

from pelton.errors import CheckpointError
from pelton.ir.block_encoder import quantize
from pelton.ir.blocks import dequantize
from pelton.ir.evaluate import evaluate, infer_quant, infer_shape
from pelton.ir.recipe import (
    AddScalar,
    Columns,
    Concat,
    Flatten,
    Full,
    PadRows,
    PermuteRows,
    Product,
    Recipe,
    Rows,
    Scale,
    ScaleColumns,
    Source,
    Sum,
    Transpose,
    add_scalar,
    rows,
)
from pelton.ir.recipe_json import from_data, to_data
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
    lambda s: PadRows(Source("a" + s), 20),
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


NORM = DENSE["a"][0]
ARITHMETIC = {
    "columns": (Columns(Source("a"), 8, 40), DENSE["a"][:, 8:40]),
    "scale": (Scale(Source("a"), 1.7), DENSE["a"] * np.float32(1.7)),
    "scale columns": (
        ScaleColumns(Source("b"), AddScalar(Rows(Source("n"), 0, 64), 1.0)),
        DENSE["b"] * (NORM + 1),
    ),
    "product": (Product(Source("c"), Source("n")), DENSE["c"] @ NORM),
    "flat": (Flatten(Rows(Source("a"), 0, 2)), DENSE["a"][:2].reshape(-1)),
    "sum": (Sum((Source("a"), Source("b"), Source("half"))), DENSE["a"] * 2 + DENSE["b"]),
    "mixed stack": (Concat((Full(3, 0.0), Source("norm"))), np.concatenate([np.zeros(3), NORM])),
    "ones": (Full(5, 1.0), np.ones(5, np.float32)),
}
VECTORS = {"n": HostTensor("float32", (64,), NORM), "k": HostTensor("float32", (16,), DENSE["a"][:, 0])}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_gives_float32_and_survives_json(name: str) -> None:
    recipe, want = ARITHMETIC[name]
    known = TENSORS | VECTORS
    got = evaluate(from_data(to_data(recipe)), known.__getitem__)
    assert (got.quant, got.shape) == (infer_quant(recipe, known), infer_shape(recipe, known))
    tolerance = 1e-2 if {"half", "norm"} & set(recipe.sources()) else 1e-6
    np.testing.assert_allclose(got.data, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["a", "half", "brain"])
def test_scaling_by_a_power_of_two_keeps_type_and_bits(name: str) -> None:
    there = Scale(Source(name), 4.0)
    assert infer_quant(there, TENSORS) == TENSORS[name].quant
    back = evaluate(Scale(there, 0.25), TENSORS.__getitem__)
    np.testing.assert_array_equal(back.data, TENSORS[name].data)
    assert infer_quant(Scale(Source(name), 3.0), TENSORS) == "float32"


def test_arithmetic_on_blocks_is_refused() -> None:
    blocks = Source("a.q4_1")
    for recipe in (
        Scale(blocks, 2.0),
        ScaleColumns(blocks, Full(64, 2.0)),
        Columns(blocks, 0, 32),
        Product(blocks, Full(64, 2.0)),
        Sum((blocks, blocks)),
    ):
        for ask in (
            lambda r=recipe: evaluate(r, TENSORS.__getitem__),
            lambda r=recipe: infer_quant(r, TENSORS),
        ):
            with pytest.raises(CheckpointError, match=r"a\.q4_1 is stored as q4_1 blocks, which cannot be"):
                ask()


def test_rows_are_taken_before_arithmetic() -> None:
    recipe = AddScalar(Scale(Rows(Source("a"), 2, 12), 3.0), 1.0)
    early = rows(recipe, 1, 4)
    assert early == AddScalar(Scale(Rows(Source("a"), 3, 6), 3.0), 1.0)
    want = evaluate(Rows(recipe, 1, 4), TENSORS.__getitem__)
    np.testing.assert_array_equal(evaluate(early, TENSORS.__getitem__).data, want.data)


def test_resolving_replaces_every_source_and_folds_what_cancels() -> None:
    recipe = Concat((Transpose(Source("a")), Product(Source("b"), AddScalar(Source("c"), 1.0))))
    assert list(recipe.sources()) == ["a", "b", "c"]
    resolved = recipe.resolve(
        lambda n: {"a": Transpose(Source("A")), "c": AddScalar(Source("C"), -1.0)}.get(n, Source(n))
    )
    assert resolved == Concat((Source("A"), Product(Source("b"), Source("C"))))
