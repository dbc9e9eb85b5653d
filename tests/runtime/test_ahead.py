"""Running one step ahead: what the host does not know yet must nowhere count as known."""

from __future__ import annotations

import numpy as np
import pytest

from pelton.runtime.executor import Executor
from pelton.runtime.scheduled import ScheduledSequence, StepArrays
from pelton.runtime.sequence import Sequence
from tests.runtime.fakes import SubmittingSession, fake_config, reference_answer
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
