"""Sampling: the numpy definition behaves as its text says, and the native library agrees with it."""

from __future__ import annotations

import numpy as np
import pytest

from pelton.kernels import native as library
from pelton.kernels.sampling import native, reference

needs_library = pytest.mark.skipif(not library.available(), reason="needs the native library (make native)")


def one(logits: np.ndarray, *, t=1.0, k=0, p=1.0, m=0.0, seed=0, position=0) -> int:
    row = np.asarray(logits, np.float32)[None]
    return int(reference.sample(row, [t], [k], [p], [m], [seed], [position])[0][0])


def draws(logits: np.ndarray, n: int = 300, **kwargs) -> np.ndarray:
    return np.array([one(logits, seed=7, position=i, **kwargs) for i in range(n)])


def test_the_exponential_is_accurate() -> None:
    x = np.linspace(-86.9, 0, 100_001, dtype=np.float32)
    want = np.exp(x.astype(np.float64))
    assert np.abs(reference.exp32(x) / want - 1).max() < 2e-7
    assert reference.exp32(np.array([0, -100, -np.inf], np.float32)).tolist() == [1, 0, 0]


def test_temperature_zero_takes_the_lowest_of_the_largest() -> None:
    assert one([0, 3, 1, 3], t=0) == 1
    assert one([np.nan, -np.inf, -5, np.nan], t=0) == 2
    assert one([-np.inf, -np.inf], t=0) == 0


def test_frequencies_follow_the_softmax() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    counts = np.bincount(draws(logits, n=2000), minlength=4) / 2000
    assert np.abs(counts - [0.5, 0.3, 0.15, 0.05]).max() < 0.04
    sharper = np.bincount(draws(logits, n=2000, t=0.5), minlength=4) / 2000
    assert abs(sharper[0] - 0.25 / 0.365) < 0.04


def test_truncations_keep_what_they_say() -> None:
    logits = np.log(np.array([0.1, 0.5, 0.05, 0.3, 0.05]))
    assert set(draws(logits, k=2)) == {1, 3}
    assert set(draws(logits, k=4)) == {0, 1, 2, 3}  # of two equal ones the first
    assert set(draws(logits, p=0.79)) == {1, 3}
    assert set(draws(logits, p=0.81)) == {0, 1, 3}
    assert set(draws(logits, p=1e-6)) == {1}
    assert set(draws(logits, k=3, p=0.5)) == {1}  # 0.5 of 0.9
    assert set(draws(logits, m=0.19)) == {0, 1, 3}
    assert set(draws(logits, m=1.0)) == {1}


def test_impossible_tokens_are_never_drawn() -> None:
    logits = np.array([0, -np.inf, np.nan, 0])
    assert set(draws(logits)) == {0, 3}
    assert set(draws(logits, k=3, p=0.999)) == {0, 3}


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((6, 100)).astype(np.float32)
    args = [[1.0] * 6, [0] * 6, [1.0] * 6, [0.0] * 6]
    together = reference.sample(logits, *args, [3, 1, 4, 1, 5, 2**64 - 1], [0, 1, 2, 3, 4, 5])[0]
    for i in range(6):
        assert together[i] == one(logits[i], seed=[3, 1, 4, 1, 5, -1][i], position=i)
    u = [reference.uniform(s, p) for s in range(50) for p in range(50)]
    assert len(set(u)) == 2500
    assert abs(np.mean(u) - 0.5) < 0.02
    assert 0 <= min(u) < max(u) < 1


def test_log_probabilities_are_those_of_the_softmax() -> None:
    rng = np.random.default_rng(2)
    logits = (rng.standard_normal((3, 500)) * 5).astype(np.float32)
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    chosen = np.array([4, 499, 0], np.int32)
    logprobs, ranks, ids, top = reference.log_softmax_topk(logits, chosen, 5)
    assert np.allclose(logprobs, exact[np.arange(3), chosen], atol=1e-5)
    assert np.allclose(top, np.sort(exact, -1)[:, ::-1][:, :5], atol=1e-5)
    assert np.array_equal(ids, np.argsort(-logits, -1)[:, :5])
    assert ranks.tolist() == [1 + int((logits[i] > logits[i, c]).sum()) for i, c in enumerate(chosen)]
    tokens, sampled = reference.sample(
        logits, [0.0, 0.7, 2.0], [0, 5, 0], [1.0] * 3, [0.0] * 3, [1] * 3, [9] * 3
    )
    assert np.allclose(sampled, exact[np.arange(3), tokens], atol=1e-5)


@pytest.mark.parametrize("k", [0, 1, 4])
def test_the_number_of_alternatives_is_as_asked(k: int) -> None:
    _, _, ids, logprobs = reference.log_softmax_topk(np.zeros((2, 4), np.float32), [0, 1], k)
    assert ids.shape == logprobs.shape == (2, k)
    assert ids.tolist() == [list(range(k))] * 2


VOCABULARIES = (1, 2, 15, 16, 17, 1000, 1024, 1025, 5000, 49152)


def assert_same_sample(logits: np.ndarray, *parameters) -> None:
    tokens, logprobs = native.sample(logits, *parameters)
    want_tokens, want_logprobs = reference.sample(logits, *parameters)
    assert tokens.tolist() == want_tokens.tolist()
    np.testing.assert_allclose(logprobs, want_logprobs, rtol=1e-6, atol=1e-6)


@needs_library
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_the_native_sampler_draws_the_same_tokens(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    rows = 48 if vocab < 10_000 else 12
    for scale in (0.01, 1, 8):
        logits = (rng.standard_normal((rows, vocab)) * scale).astype(np.float32)
        if scale == 8:
            logits = logits.round()  # ties
        assert_same_sample(
            logits,
            rng.choice([0, 0.2, 0.7, 1, 1.5], rows),
            rng.choice([0, 1, 2, 5, 50, vocab, vocab + 1], rows),
            rng.choice([1, 0.99, 0.9, 0.5, 1e-4], rows),
            rng.choice([0, 0, 0.05, 1], rows),
            rng.integers(0, 2**63, rows),
            rng.integers(0, 10_000, rows),
        )


@needs_library
def test_the_native_sampler_treats_odd_logits_alike() -> None:
    inf, nan = np.inf, np.nan
    logits = np.array(
        [
            [nan, 1, 2, -inf, 3],
            [nan, nan, nan, nan, nan],
            [-inf, -inf, -inf, -inf, -inf],
            [0, inf, 1, inf, 2],
            [-inf, 5, -inf, 5, nan],
            [3e38, -3e38, 0, 3e38, 1],
        ],
        np.float32,
    )
    for t, k, p, m in ((0, 0, 1, 0), (1, 0, 1, 0), (0.5, 3, 1, 0), (1, 0, 0.9, 0), (2, 4, 0.5, 0.1)):
        for position in range(20):
            n = len(logits)
            assert_same_sample(logits, [t] * n, [k] * n, [p] * n, [m] * n, [-1] * n, [position] * n)


@needs_library
@pytest.mark.parametrize("top_k", [0, 3000])
def test_a_large_nucleus_of_equal_logits_is_the_same(top_k: int) -> None:
    rng = np.random.default_rng(top_k)
    choices = np.array([-np.inf, np.nan, -0.0, 0.0, -1.5, -0.25, 0.25, 1.5, 1.5000001], np.float32)
    logits = rng.choice(choices, (24, 6000))
    n = len(logits)
    p = rng.choice([0.3, 0.6, 0.9, 0.999], n)
    assert_same_sample(logits, [1.0] * n, [top_k] * n, p, [0.0] * n, range(n), range(n))


@needs_library
def test_native_sampling_reads_strided_rows_and_skips_logprobs() -> None:
    wide = np.random.default_rng(3).standard_normal((8, 300)).astype(np.float32)
    for view in (wide[::2, 10:200], wide[:, ::3], wide.T[:8, :]):
        n = len(view)
        columns = [[1.0] * n, [20] * n, [0.9] * n, [0.0] * n, range(n), [5] * n]
        assert_same_sample(view, *columns)
        tokens, logprobs = native.sample(view, *columns, want_logprobs=False)
        assert tokens.tolist() == reference.sample(view, *columns)[0].tolist()
        assert not logprobs.any()


@needs_library
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_native_log_probabilities_equal_the_reference(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((5, vocab)) * 4).astype(np.float32).round(1)
    logits[0, rng.integers(0, vocab)] = np.nan
    chosen = rng.integers(0, vocab, 5)
    for k in {0, 1, min(20, vocab), min(vocab, 1000)}:
        got, want = native.log_softmax_topk(logits, chosen, k), reference.log_softmax_topk(logits, chosen, k)
        np.testing.assert_allclose(got[0], want[0], rtol=1e-6, atol=1e-6)
        assert np.array_equal(got[1], want[1])
        assert np.array_equal(got[2], want[2])
        np.testing.assert_allclose(got[3], want[3], rtol=1e-6, atol=1e-6)
