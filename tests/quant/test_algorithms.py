"""The algorithms against their papers' formulas, written a second time in float64 without their shortcuts."""

from __future__ import annotations

import numpy as np
import pytest

from pelton.dtypes import GROUP_BLOCK_TYPES
from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.blocks import dequantize
from pelton.ir.group_blocks import E4M3, group_of, scales
from pelton.ir.group_encoder import Scales, codes_of, encode, fit, into_groups, values_of
from pelton.quant import awq, llm_int8, smoothquant
from pelton.quant import gptq as gptq_module
from pelton.quant.activations import rounded_activations
from pelton.quant.gptq import gptq, inverse_factor
from pelton.quant.nf4 import double_quantized, nf4_double
from pelton.quant.qserve import progressive, progressive_tensor
from pelton.quant.rounding import fit_weight, nearest_values, round_nearest
from pelton.quant.statistics import InputStatistics, output_error, relative_errors

GPTQ_TYPES = [
    "int4_g32",
    "int2_g64",
    "int3_g32",
    "int8_row",
    "fp8_row",
    "fp8_g128",
    "nf4_g64",
    "nvfp4",
    "mxfp4",
]


def inputs(columns: int, tokens: int = 600, seed: int = 0) -> np.ndarray:
    """Correlated activations, some channels much larger."""
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((columns // 2, columns)) / columns**0.5
    x = rng.standard_normal((tokens, columns // 2)) @ mix + 0.3 * rng.standard_normal((tokens, columns))
    x *= np.exp(rng.standard_normal(columns))
    return x.astype(np.float32)


def weights(rows: int, columns: int, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)


def seen(x: np.ndarray) -> InputStatistics:
    statistics = InputStatistics.empty(x.shape[1])
    for part in np.array_split(x, 4):
        statistics.add(part)
    return statistics


# ---- Statistics ----


def test_statistics_are_those_of_all_inputs_at_once() -> None:
    x = inputs(64)
    found = seen(x)
    np.testing.assert_allclose(found.gram, x.T.astype(np.float64) @ x, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(found.abs_mean, np.abs(x).mean(axis=0), rtol=1e-5)
    np.testing.assert_array_equal(found.abs_max, np.abs(x).max(axis=0))
    assert found.tokens == 600 and found.sample.shape == (64, 64)


def test_output_error_is_that_of_the_products() -> None:
    x, w = inputs(64), weights(24, 64)
    tensor = round_nearest(w, "int4_g32")
    rounded = dequantize(tensor)
    direct = np.square((rounded - w).astype(np.float64) @ x.T).sum()
    assert output_error(rounded - w, seen(x).gram) == pytest.approx(direct, rel=1e-4)
    of_weight, of_output = relative_errors(w, tensor, seen(x).gram)
    assert of_weight == pytest.approx(np.linalg.norm(rounded - w) / np.linalg.norm(w), rel=1e-5)
    assert of_output == pytest.approx((direct / np.square(w.astype(np.float64) @ x.T).sum()) ** 0.5, rel=1e-4)


def test_dividing_the_statistics_is_dividing_the_inputs() -> None:
    x = inputs(32)
    s = np.linspace(0.2, 5, 32, dtype=np.float32)
    found, expected = seen(x), seen(x / s)
    found.divide(s)
    for name in ("gram", "abs_sum", "abs_max", "sample"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-3, atol=1e-3)


# ---- Rounding to nearest ----


def all_codes(quant: str) -> np.ndarray:
    """Every code that an encoder may choose."""
    if quant.startswith("int") and quant != "int8_row":
        return np.arange(1 << int(quant[3]), dtype=np.uint8)
    if quant == "int8_row":
        return np.arange(-127, 128).astype(np.int8).view(np.uint8)
    every = np.arange(256 if quant.startswith("fp8") else 16, dtype=np.uint8)
    return every[every & 127 != 127] if quant.startswith("fp8") else every


def grid(kept: Scales, quant: str, group: int) -> np.ndarray:
    """(rows, codes): the values that a group's codes stand for."""
    one = slice(group, group + 1)
    of_group = Scales(kept.d[:, one], None if kept.z is None else kept.z[:, one])
    every = np.broadcast_to(all_codes(quant), (len(kept.d), 1, len(all_codes(quant))))
    return values_of(every, of_group, quant)[:, 0].astype(np.float64)


@pytest.mark.parametrize("quant", list(GROUP_BLOCK_TYPES))
def test_no_value_is_nearer_than_the_one_taken(quant: str) -> None:
    w = weights(6, 256)
    found = dequantize(round_nearest(w, quant, symmetric=False))
    np.testing.assert_array_equal(found, nearest_values(w, quant, symmetric=False))
    kept, size = fit_weight(w, quant, symmetric=False), group_of(quant) or 256
    for column in range(256):
        nearest = np.abs(grid(kept, quant, column // size) - w[:, column : column + 1]).min(axis=1)
        assert (np.abs(found[:, column] - w[:, column]) <= nearest + 1e-7).all()


def test_one_scale_a_tensor_and_a_block() -> None:
    w = weights(130, 256)
    w[3] *= 7
    d = scales(round_nearest(w, "int8_row", per_tensor=True).data, "int8_row")
    np.testing.assert_allclose(d, np.abs(w).max() / 127, rtol=1e-6)
    d = scales(round_nearest(w, "fp8_g128").data, "fp8_g128")
    blocks = [np.abs(w[i : i + 128, j : j + 128]).max() / 448 for i in (0, 128) for j in (0, 128)]
    np.testing.assert_allclose(d[:128], np.broadcast_to(blocks[:2], (128, 2)), rtol=1e-6)
    np.testing.assert_allclose(d[128:], np.broadcast_to(blocks[2:], (2, 2)), rtol=1e-6)


# ---- GPTQ ----


def obq(w: np.ndarray, x: np.ndarray, quant: str, *, act_order: bool, damping: float = 0.01) -> np.ndarray:
    """Optimal brain quantisation in a given order: after each column all others that are left move by the
    closed form, and the inverse Hessian loses the column (Frantar et al. 2022, equations 2 and 3)."""
    w = w.astype(np.float64)
    h = 2 * x.T.astype(np.float64) @ x
    order = np.argsort(-np.diag(h), kind="stable") if act_order else np.arange(len(h))
    h += damping * np.diag(h).mean() * np.eye(len(h))
    inverse, size = np.linalg.inv(h), group_of(quant) or len(h)
    kept = fit_weight(w.astype(np.float32), quant, outwards=False)
    out, left = np.zeros_like(w), np.ones(len(h), bool)
    for j in order:
        if not act_order and size < len(h) and j % size == 0:
            now = fit_weight(w[:, j : j + size].astype(np.float32), quant, outwards=False, row=kept.row)
            kept.d[:, j // size] = now.d[:, 0]
        entries = grid(kept, quant, j // size)
        out[:, j] = entries[np.arange(len(w)), np.abs(entries - w[:, j : j + 1]).argmin(axis=1)]
        left[j] = False
        w[:, left] -= np.outer((w[:, j] - out[:, j]) / inverse[j, j], inverse[j, left])
        inverse -= np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return out


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("quant", GPTQ_TYPES)
def test_gptq_is_optimal_brain_quantisation_column_by_column(quant: str, act_order: bool) -> None:
    """Over more columns than a lazy batch has. Ties and float32 may turn a code: then the two go apart."""
    x, w = inputs(256), weights(5, 256)
    ours = dequantize(gptq(w, seen(x).gram, quant, act_order=act_order))
    theirs = obq(w, x, quant, act_order=act_order)
    assert (np.abs(ours - theirs) < 1e-5).mean() > 0.97
    gram = x.T.astype(np.float64) @ x
    error, expected = (np.einsum("ij,jk,ik->", e - w, gram, e - w) for e in (ours, theirs))
    assert error == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("quant", GPTQ_TYPES)
def test_gptq_beats_rounding_to_nearest_on_its_inputs(quant: str) -> None:
    x, w = inputs(256), weights(48, 256)
    gram = seen(x).gram
    plain = output_error(nearest_values(w, quant, symmetric=False) - w, gram)
    for act_order in (True, False):
        found = dequantize(gptq(w, gram, quant, symmetric=False, act_order=act_order))
        assert output_error(found - w, gram) < 0.95 * plain


def test_gptq_of_independent_inputs_is_rounding_to_nearest() -> None:
    """Nothing can make up for a column's error where channels are uncorrelated."""
    w = weights(16, 128)
    gram = np.diag(np.linspace(1, 9, 128)).astype(np.float32)
    for act_order in (True, False):
        found = gptq(w, gram, "int4_g32", symmetric=False, act_order=act_order)
        np.testing.assert_array_equal(found.data, round_nearest(w, "int4_g32", symmetric=False).data)


def test_gptq_of_channels_that_are_never_used() -> None:
    x = inputs(64)
    x[:, [3, 40]] = 0
    found = dequantize(gptq(weights(8, 64), seen(x).gram, "int4_g32", symmetric=False))
    assert (found[:, [3, 40]] == 0).all() and np.isfinite(found).all()
    found = gptq(weights(8, 64), np.zeros((64, 64), np.float32), "int4_g32", symmetric=False)
    assert (dequantize(found) == 0).all()


@pytest.mark.parametrize("wide", [False, True])
def test_the_factor_is_of_the_damped_inverse(wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = 700  # more than are inverted at once
    monkeypatch.setattr(gptq_module, "_DOUBLE", 0 if wide else columns)
    monkeypatch.setattr(gptq_module, "_STRIP", 100)
    gram = seen(inputs(columns, tokens=900)).gram
    gram = np.tril(gram) + np.tril(gram, -1).T
    order = np.random.default_rng(3).permutation(columns)
    h = 2 * gram.astype(np.float64)[np.ix_(order, order)]
    h += 0.05 * np.diag(h).mean() * np.eye(columns)
    before = gram.copy()
    with inverse_factor(gram, 0.05, order) as factor:
        assert np.shares_memory(factor, gram) == wide, "the largest array is not there twice"
        u = np.triu(factor).astype(np.float64)
    np.testing.assert_allclose(u.T @ u @ h, np.eye(columns), atol=1e-3)
    np.testing.assert_array_equal(gram, before)


@pytest.mark.parametrize("wide", [False, True])
def test_few_tokens_are_damped_until_they_can_be_used(wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptq_module, "_DOUBLE", 0 if wide else 64)
    x = np.linspace(1, 2, 64, dtype=np.float32)[None] * 1e3
    gram = x.T @ x
    with inverse_factor(gram, 1e-30) as u:
        assert np.isfinite(np.triu(u)).all() and (np.diag(u) > 0).all()
    np.testing.assert_array_equal(gram, x.T @ x)
    with (
        pytest.raises(ValueError, match="NaN or infinite"),
        inverse_factor(np.full((4, 4), np.nan, np.float32), 0.01),
    ):
        pass


@pytest.mark.parametrize("act_order", [True, False])
def test_wide_weights_get_the_same_codes(act_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a width the factor is of float32 and within the Gram matrix, which comes back as it was."""
    x, w = inputs(600), weights(24, 600)
    x[:, 5] = 0
    gram = x.T @ x
    before = gram.copy()
    narrow = gptq(w, gram, "int8_row", act_order=act_order)
    monkeypatch.setattr(gptq_module, "_DOUBLE", 0)
    wide = gptq(w, gram, "int8_row", act_order=act_order)
    np.testing.assert_array_equal(gram, before)
    assert (narrow.data == wide.data).mean() > 0.99


# ---- AWQ ----


def test_awq_takes_the_exponent_with_the_smallest_output_error() -> None:
    """Recomputed from the products themselves."""
    x, ws = inputs(64), [weights(24, 64), weights(16, 64, seed=7)]
    s, alpha = awq.search_scales(ws, seen(x), [lambda w: nearest_values(w, "int3_g32")] * 2)
    errors = {}
    for a in (i / 20 for i in range(20)):
        f = np.abs(x).mean(axis=0).astype(np.float64) ** a
        f = (f / (f.max() * f.min()) ** 0.5).astype(np.float32)
        errors[a] = sum(
            np.square((nearest_values(w * f, "int3_g32") / f - w).astype(np.float64) @ x.T).sum() for w in ws
        )
        if a == alpha:
            np.testing.assert_allclose(s, f, rtol=1e-4)
    assert errors[alpha] <= min(errors.values()) * (1 + 1e-3)
    assert alpha > 0 and errors[alpha] < 0.9 * errors[0.0]


def test_a_given_exponent_is_used_and_unused_channels_stay_finite() -> None:
    x = inputs(32)
    x[:, 5] = 0
    s, alpha = awq.search_scales([weights(8, 32)], seen(x), [lambda w: w], alpha=0.5)
    assert alpha == 0.5 and np.isfinite(s).all() and s[5] == s.min() > 0
    assert s.max() * s.min() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("symmetric", [True, False])
def test_clipping_takes_each_groups_best_share(symmetric: bool) -> None:
    x, w = inputs(64), weights(10, 64)
    w[:, 7] *= 6  # an outlier in the first group
    found = dequantize(awq.clipped_nearest(w, seen(x).gram, "int3_g32", symmetric=symmetric))
    for row in range(10):
        for group in (slice(0, 32), slice(32, 64)):
            errors = []
            for share in awq.CLIPS:
                part = w[row : row + 1, group]
                limit = np.abs(part).max() * np.float32(share)
                kept = fit(
                    into_groups(np.clip(part, -limit, limit), "int3_g32"), "int3_g32", symmetric=symmetric
                )
                values = values_of(
                    codes_of(into_groups(part, "int3_g32"), kept, "int3_g32"), kept, "int3_g32"
                )
                errors.append(np.square(x[:, group].astype(np.float64) @ (values[0, 0] - part[0])).sum())
            mine = np.square(x[:, group].astype(np.float64) @ (found[row, group] - w[row, group])).sum()
            assert mine <= min(errors) * (1 + 1e-3) + 1e-9


# ---- SmoothQuant ----


def test_smoothing_is_the_papers_formula_and_changes_no_product() -> None:
    x, ws = inputs(48), [weights(8, 48), weights(12, 48, seed=2)]
    x[:, 9] = 0
    s = smoothquant.smooth_scales(np.abs(x).max(axis=0), ws, 0.6)
    top = np.maximum(np.abs(ws[0]).max(axis=0), np.abs(ws[1]).max(axis=0)).astype(np.float64)
    expected = np.abs(x).max(axis=0).astype(np.float64) ** 0.6 / top**0.4
    expected[9] = 1
    np.testing.assert_allclose(s, expected, rtol=1e-5)
    np.testing.assert_allclose((x / s) @ (ws[0] * s).T, x @ ws[0].T, rtol=1e-3, atol=1e-4)


def test_the_strength_is_searched_on_the_quantised_product() -> None:
    x, w = inputs(64, tokens=64), weights(24, 64)
    a8 = ActivationQuant("int8")
    statistics = seen(x)
    s, alpha = smoothquant.search_scales([w], statistics, [lambda v: nearest_values(v, "int8_row")], a8)
    sample, exact = statistics.sample, statistics.sample @ w.T

    def error(f: np.ndarray) -> float:
        product = rounded_activations(sample / f, a8) @ nearest_values(w * f, "int8_row").T
        return float(np.square(product - exact).sum())

    tops = np.abs(x).max(axis=0)
    tried = [error(smoothquant.smooth_scales(tops, [w], a)) for a in smoothquant.ALPHAS]
    assert alpha is not None and error(s) == pytest.approx(min(tried), rel=1e-4)
    assert error(s) < 0.5 * error(np.ones(64, np.float32))


# ---- Activations ----


@pytest.mark.parametrize(
    "quant",
    [
        ActivationQuant("int8"),
        ActivationQuant("int8", group=16),
        ActivationQuant("int8", "tensor"),
        ActivationQuant("int8", "tensor", scale=0.01),
        ActivationQuant("fp8"),
        ActivationQuant("fp8", "tensor"),
        ActivationQuant("fp8", group=16),
        ActivationQuant("fp8", group=32),
    ],
    ids=str,
)
def test_activations_are_scale_times_code(quant: ActivationQuant) -> None:
    x = inputs(48, tokens=7)
    x[2] = 0
    top = 127 if quant.dtype == "int8" else 448
    expected = np.empty_like(x)
    for t in range(7):
        for start in range(0, 48, quant.group or 48):
            part = x[t, start : start + (quant.group or 48)]
            peak = np.abs(x).max() if quant.per == "tensor" else np.abs(part).max()
            d = np.float32(quant.scale or peak / np.float32(top))
            ratio = part / d if d else part
            q = (
                np.clip(np.rint(ratio), -127, 127)
                if quant.dtype == "int8"
                else [E4M3[:127][np.abs(E4M3[:127] - min(abs(v), 448)).argmin()] * np.sign(v) for v in ratio]
            )
            expected[t, start : start + len(part)] = d * np.asarray(q, np.float32)
    np.testing.assert_allclose(rounded_activations(x, quant), expected, rtol=1e-6, atol=1e-7)


def test_outliers_are_llm_int8s() -> None:
    x, w = inputs(64, tokens=20), weights(24, 64)
    assert 0 < (np.abs(x) >= 6).any(axis=0).sum() < 40
    ours = rounded_activations(x, ActivationQuant("int8", outliers=6.0)) @ nearest_values(w, "int8_row").T
    np.testing.assert_allclose(ours, llm_int8.product(x, w), rtol=1e-4, atol=1e-4)
    plain = rounded_activations(x, ActivationQuant("int8")) @ nearest_values(w, "int8_row").T
    exact = x @ w.T
    assert np.abs(ours - exact).mean() < 0.8 * np.abs(plain - exact).mean()


def test_a_static_scale_holds_the_largest_value_seen() -> None:
    a = smoothquant.settled(ActivationQuant("int8", "tensor", scale=-1.0), np.array([1.0, 12.7], np.float32))
    assert a.scale == pytest.approx(0.1) and a.per == "tensor"
    assert smoothquant.settled(ActivationQuant("fp8"), np.ones(3, np.float32)) == ActivationQuant("fp8")


# ---- NF4, QServe ----


def test_double_quantisation_keeps_scales_as_8_bit_floats_around_their_mean() -> None:
    d = np.random.default_rng(0).uniform(0.01, 0.09, (30, 20)).astype(np.float32)
    flat, mean = d.reshape(-1), d.mean(dtype=np.float64)
    expected = np.empty(600)
    for start in range(0, 600, 256):
        part = flat[start : start + 256] - np.float32(mean)
        c2 = np.abs(part).max() / np.float32(448)
        nearest = np.abs((np.abs(part) / c2)[:, None] - E4M3[:127]).argmin(axis=1)
        expected[start : start + 256] = mean + np.sign(part) * c2 * E4M3[nearest]
    np.testing.assert_allclose(double_quantized(d).reshape(-1), expected, rtol=1e-5)
    w = weights(16, 256)
    plain, double = (np.linalg.norm(dequantize(t) - w) for t in (encode(w, "nf4_g64"), nf4_double(w)))
    assert plain < double < 1.02 * plain


def test_progressive_groups_are_integers_within_int8() -> None:
    w = weights(40, 256)
    s0, s1, z, q = progressive(w, "int4_g64")
    inner = s1 * (q - z)
    assert np.abs(inner).max() <= 127 and s1.min() >= 1 and (q >= 0).all() and (q <= 15).all()
    values = (s0 * inner.reshape(40, 256)).astype(np.float32)
    stored = dequantize(progressive_tensor(w, "int4_g64"))
    np.testing.assert_allclose(stored, values, rtol=2**-10, atol=1e-7)
    plain = np.linalg.norm(nearest_values(w, "int4_g64", symmetric=False) - w)
    assert np.linalg.norm(values - w) < 1.2 * plain
