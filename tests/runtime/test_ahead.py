"""Running one step ahead: what the host does not know yet must nowhere count as known."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from pelton.runtime.ahead import needs_host
from pelton.runtime.executor import Executor
from pelton.runtime.request import Request
from pelton.runtime.scheduled import ScheduledSequence, StepArrays
from pelton.runtime.sequence import Sequence
from tests.runtime.fakes import FakeSession, SubmittingSession, fake_config, reference_answer
from tests.runtime.test_executor import assert_idle, drain, make_request, tokens_of


def test_a_placeholder_never_names_a_block_of_prefix() -> None:
    """A sequence preempted while its last token is being sampled fills a block with that token."""
    executor = Executor(SubmittingSession())
    size = executor.kv.block_size
    executor.add(make_request("a", [1, 2, 3], max_tokens=10))
    sequence = executor._sequences["a"]
    while not (sequence.num_unknown and sequence.num_tokens % size == 0):
        executor.step()
    executor.recompute_all()
    output = executor.scheduler.schedule()
    assert output.num_tokens
    assert sequence.keys is not None
    assert len(sequence.keys._keys) <= sequence.num_known // size


def test_sequences_leave_and_enter_while_a_step_is_in_flight() -> None:
    """Seats are given away between a step's start and its tokens: no token may reach who sits there now."""
    session = SubmittingSession(fake_config(max_batch_size=3, max_seq_len=40), 30)
    executor = Executor(session)
    prompts = {f"r{i}": [i, 2 * i, 3] for i in range(12)}
    lengths = {name: 1 + i % 5 for i, name in enumerate(prompts)}
    for name, prompt in prompts.items():
        executor.add(make_request(name, prompt, max_tokens=lengths[name]))
    answers = {name: tokens_of(updates) for name, updates in drain(executor).items()}
    assert answers == {name: reference_answer(prompts[name], lengths[name]) for name in prompts}
    assert_idle(executor)


@pytest.mark.parametrize("windows", [(0,), (0, 6)])
def test_runs_of_decode_steps_go_on_past_blocks_and_holes_between_seats(windows: tuple[int, ...]) -> None:
    """The session itself holds each step to the one before (``SubmittingSession._check_run``)."""
    session = SubmittingSession(fake_config(windows=windows, max_batch_size=5, max_seq_len=60), 90)
    executor = Executor(session)
    lengths = [40, 9, 30, 17, 25]
    prompts = {f"r{i}": [i, 7, *range(i)] for i in range(len(lengths))}
    for (name, prompt), length in zip(prompts.items(), lengths, strict=True):
        executor.add(make_request(name, prompt, max_tokens=length))
    answers = {name: tokens_of(updates) for name, updates in drain(executor).items()}
    assert answers == {
        name: reference_answer(prompt, length)
        for (name, prompt), length in zip(prompts.items(), lengths, strict=True)
    }
    assert session.num_next > 25, "most steps are of a run"
    assert_idle(executor)


def test_an_aborted_sequence_gets_nothing_from_the_step_in_flight() -> None:
    executor = Executor(SubmittingSession())
    for name in ("a", "b"):
        executor.add(make_request(name, [1, 2, 3], max_tokens=8, seed=1))
    for _ in range(3):
        executor.step()
    executor.abort("a")
    executor.add(make_request("c", [4, 5], max_tokens=3))  # takes the seat of "a"
    updates = drain(executor)
    assert [u.finish_reason for u in updates["a"]] == ["abort"]
    assert tokens_of(updates["c"]) == reference_answer([4, 5], 3)


def test_logits_that_are_not_finite_name_their_position() -> None:
    session = SubmittingSession()
    executor = Executor(session)
    executor.add(make_request("a", [1, 2, 3], max_tokens=8))
    executor.step()  # nothing has been taken yet
    session.edit_logits = lambda batch, logits: logits.fill(np.nan)
    updates = drain(executor)["a"]
    assert updates[-1].finish_reason == "error"
    assert "position 3 " in (updates[-1].error or "")
    assert_idle(executor)


@pytest.mark.parametrize("seats", [[0, 1, 2], [2, 0, 1], [4, 2, 9]])
def test_a_step_in_the_order_of_seats_keeps_what_belongs_together(seats: list[int]) -> None:
    executor = Executor(SubmittingSession())
    members = []
    for i, seat in enumerate(seats):
        sequence = Sequence(
            make_request(f"r{i}", [1] * (i + 1)),
            max_tokens=4,
            eos_token_ids=(),
            arrival_index=i,
            kv=executor.kv.new_sequence(),
            keys=None,
        )
        sequence.seat = seat
        members.append(ScheduledSequence(sequence, i, i + 1, 0, 0, i % 2 == 0))
    step = StepArrays.of(members).by_seat()
    assert step.seats_B.tolist() == sorted(seats)
    for b, sequence in enumerate(step.sequences):
        i = seats.index(step.seats_B[b])
        assert sequence.request_id == f"r{i}"
        assert (step.starts_B[b], step.counts_B[b], step.samples_B[b]) == (i, i + 1, i % 2 == 0)


EDITS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.6},
    {"presence_penalty": 1.5, "frequency_penalty": 0.4},
    {"frequency_penalty": -0.7, "temperature": 1.0},
    {"logit_bias": {3: 4.0, 9: -6.0, 11: 2.5}, "repetition_penalty": 0.7},
    {"allowed_token_ids": (4, 8, 15, 16, 23, 42)},
    {"min_tokens": 6, "stop_token_ids": tuple(range(0, 50, 2))},
    {"logprobs": 3},
    {"logprobs": 0, "repetition_penalty": 2.0, "temperature": 0.9, "top_k": 8},
    {"stop_token_ids": tuple(range(0, 50, 3)), "logprobs": 1},
]


def everyone(kind: type[FakeSession], blocks: int, *more: Request) -> tuple[Executor, dict[str, object]]:
    """The updates of a crowd with all kinds of edits, and of ``more``."""
    session = kind(fake_config(max_batch_size=4, max_num_tokens=12, max_seq_len=48), blocks)
    executor, rng = Executor(session), np.random.default_rng(3)
    answers: dict[str, list[object]] = {}
    waiting = [*more]
    for i in range(3 * len(EDITS)):
        prompt = rng.integers(0, 50, int(rng.integers(1, 14))).tolist()
        length = int(rng.integers(1, 16))
        length = max(length, int(EDITS[i % len(EDITS)].get("min_tokens", 0)))
        params: dict[str, Any] = {"max_tokens": length, "seed": i, "priority": int(rng.integers(0, 3))}
        waiting.append(make_request(f"r{i}", prompt, **params, **EDITS[i % len(EDITS)]))
    while waiting or executor.has_work:
        for _ in range(int(rng.integers(0, 3))):
            if waiting:
                executor.add(waiting.pop())
        for u in executor.step():
            got = answers.setdefault(u.request_id, [])
            logprobs = [(p.token_ids, p.rank, np.round(p.logprobs, 4).tolist()) for p in u.logprobs]
            got.append((u.new_token_ids, logprobs, u.finish_reason, u.stop_reason))
    return executor, {name: [u for u in got if u != ((), [], None, None)] for name, got in answers.items()}


@pytest.mark.parametrize("blocks", [14, 60])
@pytest.mark.parametrize("host_s", [False, True])
def test_edited_and_scored_requests_answer_as_if_the_host_sampled(blocks: int, host_s: bool) -> None:
    """Few blocks: with preemption. ``host_s``: with requests between that need the host, so that all do."""
    more = []
    if host_s:
        more = [make_request(f"h{i}", [5, 6, 7 + i], max_tokens=3, prompt_logprobs=1) for i in range(4)]
    host, expected = everyone(FakeSession, blocks, *more)
    ahead, got = everyone(SubmittingSession, blocks, *more)
    assert got == expected
    assert host.stats().preemptions > 0
    assert isinstance(ahead.session, SubmittingSession)
    assert ahead.session.num_submits > 20, "they must run ahead"


@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_long_run_samples_as_the_host_does(logprobs: int | None) -> None:
    """Parameters and random numbers of a run's steps come from the step before."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.9, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 9, "min_tokens": 30, "stop_token_ids": tuple(range(0, 50, 3))},
        {"temperature": 0.7, "presence_penalty": 0.8, "logprobs": logprobs},
        {"logprobs": 0 if logprobs else None},
    ]

    def answers(kind: type[FakeSession]) -> tuple[FakeSession, dict[str, list[object]]]:
        session = kind(fake_config(max_batch_size=8, max_seq_len=60), 120)
        executor = Executor(session)
        for i, params in enumerate(kinds):
            executor.add(make_request(f"r{i}", [i, 3, 4], max_tokens=40 + i, seed=7 * i, **params))
        got: dict[str, list[object]] = {}
        for name, updates in drain(executor).items():
            found = [(u.new_token_ids, [(p.token_ids, p.rank) for p in u.logprobs]) for u in updates]
            got[name] = [u for u in found if u != ((), [])]
        return session, got

    _, expected = answers(FakeSession)
    session, got = answers(SubmittingSession)
    assert got == expected
    assert isinstance(session, SubmittingSession)
    assert session.num_next > 35


def test_edited_requests_do_not_need_the_host_but_bad_words_of_two_tokens_do() -> None:
    def one(bad: tuple[tuple[int, ...], ...] = (), **sampling: Any) -> Sequence:
        request = msgspec.structs.replace(make_request("r", [1, 2], **sampling), bad_word_ids=bad)
        kv = Executor(FakeSession()).kv.new_sequence()
        return Sequence(request, max_tokens=8, eos_token_ids=(), arrival_index=0, kv=kv, keys=None)

    assert not any(needs_host(one(**edits)) for edits in EDITS)
    assert not needs_host(one(((5,), (6,))))
    assert needs_host(one(((5, 6),)))
    assert needs_host(one(prompt_logprobs=0))
    assert needs_host(one(logit_bias=dict.fromkeys(range(2000), 1.0)))


def test_a_sequence_whose_every_token_is_excluded_is_told_so() -> None:
    executor = Executor(SubmittingSession())
    executor.add(make_request("a", [1, 2], allowed_token_ids=(7,), logit_bias={7: -np.inf}))
    executor.add(make_request("b", [1, 2], allowed_token_ids=(7,), max_tokens=3))
    updates = drain(executor)
    assert "exclude every token" in (updates["a"][-1].error or "")
    assert tokens_of(updates["b"]) == [7, 7, 7]
