"""The executor around a fake session: answers, limits, endings, failures."""

from __future__ import annotations

import numpy as np
import pytest

from pelton.errors import ConfigError, NotReadyError, QueueFullError, RequestError
from pelton.runtime.config import ExecutorConfig
from pelton.runtime.executor import Executor
from pelton.runtime.request import Request, RequestUpdate, SamplingParams
from tests.runtime.fakes import FakeSession, fake_config, reference_answer


def make_request(
    request_id: str,
    prompt: list[int],
    *,
    priority: int = 0,
    seed: int = 0,
    salt: str = "",
    **sampling: object,
) -> Request:
    params = {"temperature": 0.0, "max_tokens": 8, **sampling}
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(**params),  # type: ignore[arg-type]
        priority=priority,
        seed=seed,
        cache_salt=salt,
    )


def drain(executor: Executor, max_steps: int = 2000) -> dict[str, list[RequestUpdate]]:
    """Step until idle; every request's updates."""
    updates: dict[str, list[RequestUpdate]] = {}
    for _ in range(max_steps):
        if not executor.has_work:
            return updates
        for update in executor.step():
            updates.setdefault(update.request_id, []).append(update)
    raise AssertionError("the executor makes no progress")


def tokens_of(updates: list[RequestUpdate]) -> list[int]:
    return [token for update in updates for token in update.new_token_ids]


def assert_idle(executor: Executor) -> None:
    """No sequence holds a block, and the books balance."""
    assert not executor.has_work
    for pool in executor.kv.pools:
        pool.check()
        assert pool.num_used == 0


def test_one_request_gives_the_reference_answer() -> None:
    executor = Executor(FakeSession())
    executor.add(make_request("a", [1, 2, 3], max_tokens=10))
    updates = drain(executor)["a"]
    assert tokens_of(updates) == reference_answer([1, 2, 3], 10)
    assert [u.finish_reason for u in updates] == [None] * 9 + ["length"]
    assert_idle(executor)


@pytest.mark.parametrize("windows", [(0,), (6,), (0, 6), (0, 1), (0, 5, 16)])
@pytest.mark.parametrize("num_blocks", [17, 40])
def test_many_requests_give_what_each_gives_alone(windows: tuple[int, ...], num_blocks: int) -> None:
    executor = Executor(FakeSession(fake_config(windows=windows), num_blocks))
    rng = np.random.default_rng(0)
    prompts = {f"r{i}": rng.integers(0, 50, rng.integers(1, 40)).tolist() for i in range(20)}
    for request_id, prompt in prompts.items():
        executor.add(make_request(request_id, prompt, max_tokens=20))
    updates = drain(executor)
    for request_id, prompt in prompts.items():
        assert tokens_of(updates[request_id]) == reference_answer(prompt, 20)
    if num_blocks == 17 and 0 in windows:
        assert executor.stats().preemptions > 0
    assert_idle(executor)


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    session = FakeSession(fake_config(max_num_tokens=5))
    executor = Executor(session)
    prompt = list(range(33))
    executor.add(make_request("a", prompt, max_tokens=3))
    assert tokens_of(drain(executor)["a"]) == reference_answer(prompt, 3)
    assert session.num_runs == 7 + 2


def test_a_repeated_prompt_computes_its_last_token_only() -> None:
    executor = Executor(FakeSession(fake_config(windows=(0, 6))))
    prompt = list(range(16))
    executor.add(make_request("a", prompt, max_tokens=2))
    first = drain(executor)["a"]
    before = executor.stats().computed_tokens
    executor.add(make_request("b", prompt, max_tokens=2))
    second = drain(executor)["b"]
    assert tokens_of(first) == tokens_of(second)
    assert (first[0].num_cached_tokens, second[0].num_cached_tokens) == (0, 15)
    assert executor.stats().computed_tokens - before == 2
    assert_idle(executor)


def test_answers_to_one_prompt_compute_it_once() -> None:
    executor = Executor(FakeSession(fake_config(max_num_tokens=64)))
    prompt = list(range(32))
    for i in range(4):
        executor.add(make_request(f"a.{i}", prompt, max_tokens=2))
    updates = drain(executor)
    assert {tuple(tokens_of(u)) for u in updates.values()} == {tuple(reference_answer(prompt, 2))}
    assert executor.stats().computed_tokens == 32 + 3 + 4


def test_a_salt_separates_caches() -> None:
    executor = Executor(FakeSession())
    for i, salt in enumerate(("", "x", "x", "y")):
        executor.add(make_request(f"{i}", list(range(16)), max_tokens=1, salt=salt))
        updates = drain(executor)[f"{i}"]
        assert updates[0].num_cached_tokens == (15 if i == 2 else 0)


def test_generated_tokens_are_cached_for_the_next_turn() -> None:
    executor = Executor(FakeSession())
    executor.add(make_request("a", [1, 2, 3], max_tokens=14))
    turn = [1, 2, 3, *tokens_of(drain(executor)["a"])]
    executor.add(make_request("b", [*turn, 7, 8], max_tokens=4))
    updates = drain(executor)["b"]
    assert updates[0].num_cached_tokens == 16
    assert tokens_of(updates) == reference_answer([*turn, 7, 8], 4)


def test_prefix_caching_can_be_switched_off() -> None:
    executor = Executor(FakeSession(), ExecutorConfig(enable_prefix_caching=False))
    for request_id in "ab":
        executor.add(make_request(request_id, list(range(16)), max_tokens=1))
        assert drain(executor)[request_id][0].num_cached_tokens == 0


def test_better_priority_runs_first_and_takes_blocks() -> None:
    executor = Executor(FakeSession(num_blocks=16), ExecutorConfig(max_num_seqs=2))
    for i in range(3):
        executor.add(make_request(f"low{i}", [i, i], max_tokens=50, priority=5))
    executor.step()
    executor.add(make_request("high", [9, 9], max_tokens=5, priority=1))
    seen = [update.request_id for update in executor.step()]
    assert seen[0] == "high"
    updates = drain(executor)
    assert tokens_of(updates["low1"])[-1] == reference_answer([1, 1], 50)[-1]
    assert list(updates)[-1] == "low2"
    assert_idle(executor)


@pytest.mark.parametrize("reason", ["length", "eos", "stop token", "abort", "close", "error", "nan"])
def test_every_ending_returns_all_blocks(reason: str) -> None:
    prompt = list(range(10))
    answer = reference_answer(prompt, 20)
    eos = (answer[4],) if reason == "eos" else ()

    def explode(batch: object) -> None:
        if reason == "error" and session.num_runs > 6:
            raise ValueError("boom")

    def edit(batch: object, logits: np.ndarray) -> None:  # type: ignore[type-arg]
        if reason == "nan" and session.num_runs > 6:
            logits[:, 3] = np.nan

    session = FakeSession(
        fake_config(windows=(0, 6), eos_token_ids=eos), before_run=explode, edit_logits=edit
    )
    executor = Executor(session)
    stops = (answer[4],) if reason == "stop token" else ()
    executor.add(make_request("a", prompt, max_tokens=20, stop_token_ids=stops))
    got: list[RequestUpdate] = []
    while executor.has_work:
        got += executor.step()
        if len(got) == 3 and reason == "abort":
            executor.abort("a")
        if len(got) == 3 and reason == "close":
            executor.close()
    last = got[-1]
    assert_idle(executor)
    match reason:
        case "length":
            assert (last.finish_reason, tokens_of(got)) == ("length", answer)
        case "eos":
            assert (last.finish_reason, last.stop_reason) == ("stop", None)
            assert tokens_of(got) == answer[: answer.index(answer[4]) + 1]
        case "stop token":
            assert (last.finish_reason, last.stop_reason) == ("stop", answer[4])
        case "abort" | "close":
            assert (last.finish_reason, tokens_of(got)) == ("abort", answer[:3])
        case "error":
            assert last.finish_reason == "error"
            assert last.error == "the engine failed on this request: ValueError: boom"
        case "nan":
            assert last.finish_reason == "error"
            assert last.error is not None
            assert "not finite" in last.error


def test_only_the_member_that_fails_again_ends_with_an_error() -> None:
    def explode(batch: object) -> None:
        if 13 in batch.input_ids_T:  # type: ignore[attr-defined]
            raise RuntimeError("thirteen")

    executor = Executor(FakeSession(fake_config(vocab_size=13 + 1), before_run=explode))
    prompts = {"good": [1, 2, 3], "bad": [4, 13], "fine": [5]}
    for request_id, prompt in prompts.items():
        executor.add(make_request(request_id, prompt, max_tokens=3, allowed_token_ids=(0, 1, 2)))
    updates = drain(executor)
    assert updates["bad"][-1].finish_reason == "error"
    for request_id in ("good", "fine"):
        assert updates[request_id][-1].finish_reason == "length"
        assert len(tokens_of(updates[request_id])) == 3
    assert_idle(executor)


def test_broken_logits_end_their_own_request_only() -> None:
    def edit(batch: object, logits: np.ndarray) -> None:  # type: ignore[type-arg]
        rows = batch.input_ids_T[batch.logits_indices_N]  # type: ignore[attr-defined]
        logits[rows == 7] = np.inf

    executor = Executor(FakeSession(edit_logits=edit))
    executor.add(make_request("good", [1, 2, 3], max_tokens=1))
    executor.add(make_request("bad", [4, 7], max_tokens=1))
    updates = drain(executor)
    assert updates["bad"][0].finish_reason == "error"
    assert tokens_of(updates["good"]) == reference_answer([1, 2, 3], 1)
    assert_idle(executor)


def test_abort_frees_waiting_running_and_preempted_requests() -> None:
    executor = Executor(FakeSession(num_blocks=17), ExecutorConfig(max_num_seqs=4))
    for i in range(8):
        executor.add(make_request(f"{i}", [i] * 12, max_tokens=40))
    while not executor.stats().preemptions:
        executor.step()
    for i in range(8):
        executor.abort(f"{i}")
        executor.abort("nobody")
    updates = executor.step()
    assert {u.request_id: u.finish_reason for u in updates} == {f"{i}": "abort" for i in range(8)}
    assert_idle(executor)
    assert executor.stats().finished["abort"] == 8


def test_the_queue_has_a_limit_and_ids_are_unique() -> None:
    executor = Executor(FakeSession(), ExecutorConfig(max_waiting=2))
    executor.add(make_request("a", [1]))
    with pytest.raises(RequestError, match="'a' is in use"):
        executor.add(make_request("a", [1]))
    executor.add(make_request("b", [1]))
    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        executor.add(make_request("c", [1]))
    drain(executor)
    executor.add(make_request("c", [1]))
    drain(executor)
    executor.close()
    with pytest.raises(NotReadyError):
        executor.add(make_request("d", [1]))


def test_what_can_never_fit_is_refused_at_once() -> None:
    executor = Executor(FakeSession(num_blocks=5))
    assert executor.max_request_tokens == 21
    with pytest.raises(RequestError, match="a request may have 21 tokens in all"):
        executor.add(make_request("a", [1] * 10, max_tokens=12))
    executor.add(make_request("b", [1] * 10, max_tokens=11))
    assert len(tokens_of(drain(executor)["b"])) == 11


def test_prompt_logprobs_score_every_prompt_token_and_bypass_hits() -> None:
    session = FakeSession()
    executor = Executor(session)
    prompt = list(range(20))
    executor.add(make_request("warm", prompt, max_tokens=1))
    executor.add(make_request("a", prompt, max_tokens=2, prompt_logprobs=2, logprobs=0))
    executor.add(make_request("b", [3, 4], max_tokens=9))
    updates = drain(executor)
    first = updates["a"][0]
    assert first.num_cached_tokens == 0
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert [entry.token_ids[0] for entry in first.prompt_logprobs[1:] if entry] == prompt[1:]
    assert all(len(entry.token_ids) == 3 for entry in first.prompt_logprobs[1:] if entry)
    assert updates["a"][1].prompt_logprobs is None
    assert [len(u.logprobs) for u in updates["a"]] == [1, 1]
    assert tokens_of(updates["b"]) == reference_answer([3, 4], 9)
    assert_idle(executor)


def test_broken_logits_inside_a_scored_prompt_are_an_error_that_names_the_position() -> None:
    def edit(batch: object, logits: np.ndarray) -> None:  # type: ignore[type-arg]
        rows = batch.positions_T[batch.logits_indices_N]  # type: ignore[attr-defined]
        logits[rows == 9, 5] = np.nan

    executor = Executor(FakeSession(edit_logits=edit))
    executor.add(make_request("plain", list(range(12)), max_tokens=1))
    executor.add(make_request("scored", list(range(12)), max_tokens=1, prompt_logprobs=0))
    updates = drain(executor)
    assert updates["plain"][-1].finish_reason == "length"
    assert updates["scored"][-1].error is not None
    assert "logits at position 9 are not finite" in updates["scored"][-1].error
    assert_idle(executor)


def test_settings_beyond_the_engine_are_refused() -> None:
    session = FakeSession()
    with pytest.raises(ConfigError, match="max_num_seqs is 9; this engine was built for 1 to 8"):
        Executor(session, ExecutorConfig(max_num_seqs=9))
    with pytest.raises(ConfigError, match="max_logits_rows is 2"):
        Executor(session, ExecutorConfig(max_logits_rows=2))


def test_the_watchdog_sees_work_without_progress() -> None:
    executor = Executor(FakeSession(), ExecutorConfig(watchdog_seconds=1e-9))
    assert not executor.stats().stuck
    executor.add(make_request("a", [1]))
    assert executor.stats().stuck
    drain(executor)
    assert not executor.stats().stuck
