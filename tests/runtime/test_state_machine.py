"""A random walk over add, abort, step and failing steps, on caches so small that everything happens.

After each move the books must balance; at the end every answer must be what its request gives alone.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pelton.engine.config import EngineConfig
from pelton.errors import RequestError
from pelton.kernels.sampling.reference import log_softmax_topk, sample
from pelton.runtime.config import ExecutorConfig
from pelton.runtime.executor import Executor
from pelton.runtime.request import Request, RequestUpdate, SamplingParams
from pelton.runtime.sequence import Sequence
from pelton.runtime.validation import resolve_requests
from tests.runtime.fakes import (
    ROOT,
    FakeSession,
    SubmittingSession,
    chain_logits,
    fake_config,
    next_chain,
    reference_answer,
)

VOCAB = 50
FAMILIES = [[family * 7 + i % 5 for i in range(24)] for family in range(3)]


def solo_answer(request: Request) -> list[int]:
    """The answer of ``request`` alone, by the definition of sampling."""
    params = request.sampling

    def pick(logits_V: np.ndarray, position: int) -> int:  # type: ignore[type-arg]
        ids, _ = sample(
            logits_V[None], [params.temperature], [params.top_k], [params.top_p], [params.min_p],
            [request.seed], [position],
        )  # fmt: skip
        return int(ids[0])

    assert params.max_tokens is not None
    answer = reference_answer(request.prompt_token_ids, params.max_tokens, VOCAB, pick)
    for i, token in enumerate(answer):
        if token in params.stop_token_ids:
            return answer[: i + 1]
    return answer


def solo_prompt_logprobs(prompt: tuple[int, ...]) -> list[float]:
    chain, scores = ROOT, []
    for token, following in pairwise(prompt):
        chain = next_chain(chain, token)
        scores.append(float(log_softmax_topk(chain_logits(chain, VOCAB)[None], [following], 0)[0][0]))
    return scores


class ExecutorMachine(RuleBasedStateMachine):
    @initialize(
        windows=st.sampled_from([(0,), (0,), (6,), (0, 6), (0, 9, 3)]),
        num_blocks=st.integers(8, 20),
        max_num_seqs=st.integers(1, 5),
        max_num_tokens=st.integers(1, 16),
        caching=st.booleans(),
    )
    def start(
        self, windows: tuple[int, ...], num_blocks: int, max_num_seqs: int, max_num_tokens: int, caching: bool
    ) -> None:
        self.config = fake_config(
            windows=windows,
            vocab_size=VOCAB,
            max_seq_len=40,
            max_batch_size=max_num_seqs,
            max_num_tokens=max_num_tokens,
        )
        self.fail_next = False
        self.session = self.make_session(self.config, num_blocks)
        self.executor = Executor(self.session, ExecutorConfig(enable_prefix_caching=caching, max_waiting=12))
        self.requests: dict[str, Request] = {}
        self.updates: dict[str, list[RequestUpdate]] = {}
        self.aborted: set[str] = set()
        self.count = 0

    def make_session(self, config: EngineConfig, num_blocks: int) -> FakeSession:
        return FakeSession(config, num_blocks, before_run=self.maybe_fail)

    def maybe_fail(self, batch: object) -> None:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("a passing fault")

    @rule(
        family=st.sampled_from(FAMILIES),
        shared=st.integers(0, 24),
        suffix=st.lists(st.integers(0, VOCAB - 1), max_size=8),
        max_tokens=st.integers(1, 16),
        n=st.sampled_from([1, 1, 1, 3]),
        priority=st.integers(0, 2),
        temperature=st.sampled_from([0.0, 1.0]),
        top_k=st.sampled_from([0, 5]),
        stop=st.lists(st.integers(0, VOCAB - 1), max_size=4),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        salt=st.sampled_from(["", "", "s"]),
    )
    def add(
        self,
        family: list[int],
        shared: int,
        suffix: list[int],
        max_tokens: int,
        n: int,
        priority: int,
        temperature: float,
        top_k: int,
        stop: list[int],
        prompt_logprobs: int | None,
        salt: str,
    ) -> None:
        prompt = family[:shared] + suffix
        if not prompt or len(self.executor.scheduler.waiting) + n > 12:
            return
        self.count += 1
        params = SamplingParams(
            n=n,
            temperature=temperature,
            top_k=top_k,
            max_tokens=max_tokens,
            stop_token_ids=tuple(stop),
            prompt_logprobs=prompt_logprobs,
            seed=self.count,
        )
        limit = self.executor.max_request_tokens
        try:
            requests = resolve_requests(
                prompt, params, self.config, None, f"r{self.count}", priority,
                cache_salt=salt, max_request_tokens=limit,
            )  # fmt: skip
        except RequestError:
            assert len(prompt) + max_tokens > limit
            return
        for request in requests:
            self.executor.add(request)
            self.requests[request.request_id] = request

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        if request_id not in {u for u, got in self.updates.items() if got[-1].finish_reason}:
            self.aborted.add(request_id)
        self.executor.abort(request_id)

    @rule()
    def a_passing_fault(self) -> None:
        self.fail_next = True

    @rule(times=st.integers(1, 5))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.one_step()

    def one_step(self) -> None:
        scheduler = self.executor.scheduler
        first = min([*scheduler.running, *scheduler.waiting], key=lambda s: s.order, default=None)
        before = self.progress(first)
        computed = self.executor.stats().computed_tokens
        for update in self.executor.step():
            self.updates.setdefault(update.request_id, []).append(update)
            assert update.finish_reason != "error", update.error
        spent = self.executor.stats().computed_tokens - computed
        budget = self.config.build.max_num_tokens
        assert budget is not None
        assert spent <= budget
        if first is not None:
            assert spent > 0
            gone = first not in [*scheduler.running, *scheduler.waiting]
            assert gone or self.progress(first) > before, "the first sequence stood still"

    @staticmethod
    def progress(sequence: Sequence | None) -> tuple[int, int]:
        return (sequence.num_tokens, sequence.num_computed) if sequence else (0, 0)

    @invariant()
    def the_books_balance(self) -> None:
        executor = getattr(self, "executor", None)
        if executor is None:
            return
        running, waiting = executor.scheduler.running, executor.scheduler.waiting
        assert len(running) <= executor.config.max_num_seqs
        for queue in (running, waiting):
            assert queue == sorted(queue, key=lambda s: s.order)
        assert not {id(s) for s in running} & {id(s) for s in waiting}
        assert all(s.num_computed == 0 for s in waiting)
        assert all(s.num_computed < s.num_tokens for s in running)
        seated = [s.seat for s in running]
        assert len(set(seated)) == len(seated) and min(seated, default=0) >= 0
        assert all(s.seat == -1 for s in waiting)
        for s in [*running, *waiting]:
            assert s.keys is None or len(s.keys._keys) <= s.num_known // executor.kv.block_size, (
                "a block was named by a token that is not known yet"
            )
        for g, pool in enumerate(executor.kv.pools):
            pool.check()
            holders: Counter[int] = Counter()
            for sequence in [*running, *waiting]:
                held = sequence.kv.tables[g].held()
                assert len(set(held)) == len(held), "a block stands twice in one table"
                assert not held or sequence in running
                holders.update(held)
            for block in range(pool.num_blocks):
                assert pool.ref_count(block) == holders[block]
            for block, count in holders.items():
                assert count == 1 or block in pool._by_key.values(), "a block is shared but not cached"

    def teardown(self) -> None:
        if not hasattr(self, "executor"):
            return
        for _ in range(3000):
            if not self.executor.has_work:
                break
            self.one_step()
            self.the_books_balance()
        assert not self.executor.has_work, "work is left but nothing moves"
        assert [pool.num_used for pool in self.executor.kv.pools] == [0] * len(self.executor.kv.pools)
        for request_id, request in self.requests.items():
            self.check_answer(request, self.updates[request_id])

    def check_answer(self, request: Request, updates: list[RequestUpdate]) -> None:
        answer = [token for update in updates for token in update.new_token_ids]
        expected = solo_answer(request)
        assert [u.finish_reason for u in updates[:-1]] == [None] * (len(updates) - 1)
        if request.request_id in self.aborted:
            assert updates[-1].finish_reason == "abort"
            assert answer == expected[: len(answer)]
            return
        assert answer == expected
        stopped = answer[-1] in request.sampling.stop_token_ids
        assert updates[-1].finish_reason == ("stop" if stopped else "length")
        if request.sampling.prompt_logprobs is not None:
            got = updates[0].prompt_logprobs
            assert got is not None
            assert got[0] is None
            scores = [entry.logprobs[0] for entry in got[1:] if entry is not None]
            assert scores == solo_prompt_logprobs(request.prompt_token_ids)


CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much]
TestExecutor = ExecutorMachine.TestCase
TestExecutor.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=CHECKS
)


class AheadMachine(ExecutorMachine):
    """The same walk, one step ahead of the host; requests that need the host's logits come between."""

    def make_session(self, config: EngineConfig, num_blocks: int) -> FakeSession:
        return SubmittingSession(config, num_blocks)

    def one_step(self) -> None:
        # A step may only take what the one before has sampled, so that single steps need no progress;
        # that all work ends, teardown shows.
        for update in self.executor.step():
            self.updates.setdefault(update.request_id, []).append(update)
            assert update.finish_reason != "error", update.error


TestExecutorAhead = AheadMachine.TestCase
TestExecutorAhead.settings = TestExecutor.settings


class _Longer(ExecutorMachine):
    pass


class _LongerAhead(AheadMachine):
    pass


TestExecutorLonger = pytest.mark.timeout(1500)(pytest.mark.slow(_Longer.TestCase))
TestExecutorLongerAhead = pytest.mark.timeout(1500)(pytest.mark.slow(_LongerAhead.TestCase))
TestExecutorLonger.settings = TestExecutorLongerAhead.settings = settings(
    max_examples=200, stateful_step_count=80, deadline=None, suppress_health_check=CHECKS
)
