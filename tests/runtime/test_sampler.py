"""Sampling as users see it: order of the parameters' application, statistics, independence of the batch."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pelton.runtime.executor import Executor
from pelton.runtime.kv_cache import SequenceKV
from pelton.runtime.logits import LogitsProcessor
from pelton.runtime.request import Request, SamplingParams
from pelton.runtime.sampler import sample
from pelton.runtime.sequence import Sequence
from tests.runtime.fakes import FakeSession, fake_config
from tests.runtime.test_executor import drain, make_request, tokens_of

VOCAB = 12
EOS = 11


def make_sequence(
    prompt: list[int], output: list[int] | None = None, *, seed: int = 0, bad: Any = (), **sampling: Any
) -> Sequence:
    params = SamplingParams(**{"temperature": 0.0, **sampling})
    request = Request(
        request_id="r",
        prompt_token_ids=tuple(prompt),
        sampling=params,
        seed=seed,
        bad_word_ids=tuple(map(tuple, bad)),
    )
    sequence = Sequence(
        request, max_tokens=64, eos_token_ids=(EOS,), arrival_index=0, kv=SequenceKV(1, 1), keys=None
    )
    sequence.processor = LogitsProcessor(sequence)
    for token in output or []:
        sequence.append(token)
    return sequence


def processed(sequence: Sequence, logits: Any = None) -> np.ndarray[Any, Any]:
    row = np.arange(VOCAB, dtype=np.float32) - 5 if logits is None else np.array(logits, np.float32)
    processor = sequence.processor
    assert isinstance(processor, LogitsProcessor)
    if not processor.is_noop(sequence):
        processor.apply(row, sequence)
    return row


RAW = np.arange(VOCAB, dtype=np.float32) - 5


def changed(row: np.ndarray[Any, Any]) -> dict[int, float]:
    """Where ``row`` differs from the raw logits."""
    return {i: float(row[i]) for i in range(VOCAB) if row[i] != RAW[i]}


def test_without_parameters_nothing_changes() -> None:
    assert changed(processed(make_sequence([1, 2], [3]))) == {}


def test_repetition_penalty_counts_prompt_and_output() -> None:
    row = processed(make_sequence([1, 9], [8, 8], repetition_penalty=2.0))
    assert changed(row) == {1: -8.0, 9: 2.0, 8: 1.5}


def test_presence_and_frequency_penalties_count_output_only() -> None:
    row = processed(make_sequence([1, 9], [8, 8, 9], presence_penalty=0.5, frequency_penalty=0.25))
    assert changed(row) == {8: 3 - 0.5 - 0.5, 9: 4 - 0.5 - 0.25}


def test_bias_comes_before_penalties_and_repetition_before_the_others() -> None:
    row = processed(
        make_sequence([1], [8], logit_bias={8: 1.0}, repetition_penalty=2.0, presence_penalty=1.0)
    )
    assert row[8] == (3 + 1) / 2 - 1


def test_masks_are_not_undone_by_bias() -> None:
    row = processed(
        make_sequence([1], bad=[[8]], allowed_token_ids=(7, 8, 9), logit_bias={8: 100.0, 2: 100.0})
    )
    assert np.flatnonzero(row > -np.inf).tolist() == [7, 9]


def test_bad_words_of_several_tokens_are_stopped_at_their_last() -> None:
    bad = [[4], [5, 6, 7], [6, 8]]
    masked = lambda output: [
        i for i in range(VOCAB) if processed(make_sequence([5, 6], output, bad=bad))[i] == -np.inf
    ]
    assert masked([]) == [4], "the prompt does not count"
    assert masked([5]) == [4]
    assert masked([5, 6]) == [4, 7, 8]
    assert masked([9, 6]) == [4, 8]


def test_min_tokens_masks_what_would_end_the_answer() -> None:
    masked = lambda output, **kw: [
        i
        for i in range(VOCAB)
        if processed(make_sequence([1], output, min_tokens=2, stop_token_ids=(3,), **kw))[i] == -np.inf
    ]
    assert masked([]) == masked([5]) == [3, EOS]
    assert masked([5, 5]) == []
    assert masked([], ignore_eos=True) == [3]


def test_excluding_every_token_is_an_error_of_that_row() -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    bad, good = make_sequence([1], allowed_token_ids=(3,), bad=[[3]]), make_sequence([1])
    results = sample(logits, [bad, good])
    assert results[0].error is not None
    assert "exclude every token" in results[0].error
    assert (results[1].token, results[1].error) == (0, None)


def test_logits_are_left_unchanged() -> None:
    logits = np.random.default_rng(0).normal(size=(2, VOCAB)).astype(np.float32)
    logits.flags.writeable = False
    sample(
        logits,
        [make_sequence([1], [2], temperature=1.0, repetition_penalty=1.5, logprobs=2), make_sequence([1])],
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_broken_rows_are_errors(bad: float) -> None:
    logits = np.zeros((3, VOCAB), np.float32)
    logits[1, 4 if bad != -np.inf else slice(None)] = bad
    for temperature in (0.0, 1.0):
        results = sample(logits, [make_sequence([1], temperature=temperature) for _ in range(3)])
        assert [r.error is None for r in results] == [True, False, True]


def test_reported_logprobs_are_of_the_models_own_logits() -> None:
    logits = np.log(np.array([[0.1, 0.2, 0.3, 0.4]], np.float32))
    (plain,) = sample(logits, [make_sequence([1], logprobs=2)])
    assert plain.logprobs is not None
    assert plain.logprobs.token_ids == (3, 3, 2)
    assert np.exp(plain.logprobs.logprobs) == pytest.approx([0.4, 0.4, 0.3], rel=1e-5)
    assert plain.logprobs.rank == 1
    (masked,) = sample(logits, [make_sequence([1], logprobs=0, bad=[[3], [2]], temperature=0.0)])
    assert masked.logprobs is not None
    assert (masked.logprobs.token_ids, masked.logprobs.rank) == ((1,), 3)
    assert np.exp(masked.logprobs.logprobs) == pytest.approx([0.2], rel=1e-5)


def draw(probabilities: list[float], times: int, **sampling: Any) -> Counter[int]:
    """Tokens of ``times`` seeds from one distribution."""
    row = np.log(np.array(probabilities, np.float32))
    logits = np.broadcast_to(row, (times, len(row)))
    sequences = [make_sequence([1], seed=seed, temperature=1.0) for seed in range(times)]
    for sequence in sequences:
        params = SamplingParams(**{"temperature": 1.0, **sampling})
        sequence.request = Request(
            request_id="r", prompt_token_ids=(1,), sampling=params, seed=sequence.request.seed
        )
    return Counter(result.token for result in sample(logits, sequences))


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, [0.1, 0.2, 0.3, 0.4]),
        ({"temperature": 0.5}, [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
        ({"top_k": 2}, [0, 0, 3 / 7, 4 / 7]),
        ({"top_p": 0.65}, [0, 0, 3 / 7, 4 / 7]),
        ({"min_p": 0.6}, [0, 0, 3 / 7, 4 / 7]),
        ({"top_k": 3, "top_p": 0.7}, [0, 0, 3 / 7, 4 / 7]),
        ({"temperature": 0.0}, [0, 0, 0, 1]),
    ],
)
def test_frequencies_are_the_probabilities(sampling: dict[str, Any], expected: list[float]) -> None:
    times = 1500
    counts = draw([0.1, 0.2, 0.3, 0.4], times, **sampling)
    chi2 = 0.0
    for token, probability in enumerate(expected):
        if probability == 0:
            assert counts[token] == 0
        else:
            chi2 += (counts[token] - times * probability) ** 2 / (times * probability)
    assert chi2 < 16.3, "three degrees of freedom: above this with probability 0.001"


def test_successive_positions_draw_independently() -> None:
    sequence = make_sequence([1], temperature=1.0, seed=3)
    logits = np.zeros((1, 2), np.float32)
    tokens = []
    for _ in range(63):
        (result,) = sample(logits, [sequence])
        tokens.append(result.token)
        sequence.append(result.token)
    pairs = Counter(pairwise(tokens))
    assert len(pairs) == 4
    assert 15 < sum(tokens) < 48


@pytest.mark.parametrize("limits", [(8, 16, 60), (3, 5, 60), (8, 16, 16)])
def test_a_sampled_answer_does_not_depend_on_the_batch(limits: tuple[int, int, int]) -> None:
    max_batch_size, max_num_tokens, num_blocks = limits
    config = fake_config(max_batch_size=max_batch_size, max_num_tokens=max_num_tokens)
    requests = [
        make_request(
            f"r{i}",
            list(range(i, 2 * i + 5)),
            seed=i % 3,
            temperature=0.5 + i / 10,
            top_p=0.9,
            top_k=20,
            min_p=0.01,
            repetition_penalty=1.2,
            frequency_penalty=0.3,
            presence_penalty=0.1,
            logit_bias={3: 1.0},
            min_tokens=3,
            stop_token_ids=(5, 6, 7),
            max_tokens=20,
            logprobs=3,
        )
        for i in range(10)
    ]
    batched = Executor(FakeSession(config, num_blocks))
    for request in requests:
        batched.add(request)
    together = drain(batched)
    for request in requests:
        alone = Executor(FakeSession(fake_config(), 60))
        alone.add(request)
        solo = drain(alone)[request.request_id]
        batch = together[request.request_id]
        assert tokens_of(batch) == tokens_of(solo)
        assert [u.logprobs for u in batch] == [u.logprobs for u in solo]
        assert len(tokens_of(solo)) >= 3


def test_greedy_without_parameters_costs_about_an_argmax() -> None:
    logits = np.random.default_rng(0).normal(size=(8, 49152)).astype(np.float32)
    sequences = [make_sequence([1]) for _ in range(8)]

    def seconds(function: Any) -> float:
        best = np.inf
        for _ in range(20):
            started = time.process_time()
            function()
            best = min(best, time.process_time() - started)
        return float(best)

    assert seconds(lambda: sample(logits, sequences)) < 3 * seconds(lambda: logits.argmax(axis=1)) + 1e-3
