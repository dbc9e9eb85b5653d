"""However a request meets the scheduler, its greedy answer is the same.

Solo, batched with others, prefilled in chunks, out of the prefix cache, preempted and recomputed: on a
real (tiny, float32) engine, token by token, with every block returned at the end.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pelton
from pelton.runtime.config import ExecutorConfig
from pelton.runtime.executor import Executor
from pelton.runtime.request import Request, SamplingParams
from tests.checkpoint.makers import VOCAB_SIZE, tiny_hf_checkpoint

BLOCK, MAX_LEN = 8, 96


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 has two KV groups, one of them with a window."""
    folder = tmp_path_factory.mktemp("equivalence")
    checkpoint = tiny_hf_checkpoint(request.param, folder)
    config = pelton.BuildConfig(
        dtype="float32",
        activations="float32",
        kv_dtype="float32",
        max_batch_size=6,
        max_seq_len=MAX_LEN,
        max_num_tokens=MAX_LEN,
        block_size=BLOCK,
    )
    pelton.build(checkpoint, config, output=folder / "x.engine")
    return folder / "x.engine"


def greedy(request_id: str, prompt: list[int], max_tokens: int, priority: int = 0) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        priority=priority,
    )


class Driver:
    """Collects every step's tokens by request."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.answers: dict[str, list[int]] = {}

    def step(self) -> None:
        for update in self.executor.step():
            assert update.error is None
            self.answers.setdefault(update.request_id, []).extend(update.new_token_ids)

    def drain(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.executor.has_work:
                return
            self.step()
        raise AssertionError("the executor does not come to an end")


def used_blocks(executor: Executor) -> int:
    return sum(group.used_blocks for group in executor.stats().kv_groups)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**20),
    lengths=st.lists(st.integers(1, 40), min_size=2, max_size=6),
    answers=st.integers(1, 20),
    shared=st.integers(0, 24),
    budget=st.integers(3, 40),
    blocks=st.integers(13, 30),
)
def test_solo_batched_chunked_cached_and_preempted_answers_are_equal(
    engine: Path, seed: int, lengths: list[int], answers: int, shared: int, budget: int, blocks: int
) -> None:
    rng = np.random.default_rng(seed)
    common = rng.integers(0, VOCAB_SIZE, shared).tolist()
    prompts = [(common + rng.integers(0, VOCAB_SIZE, n).tolist())[:64] for n in lengths]
    prompts.append(prompts[0])  # a full prefix hit

    with pelton.Session(engine, threads=1) as session:
        solo = []
        for prompt in prompts:
            driver = Driver(Executor(session, ExecutorConfig(enable_prefix_caching=False)))
            driver.executor.add(greedy("solo", prompt, answers))
            driver.drain()
            solo.append(driver.answers["solo"])
            assert len(solo[-1]) == answers
            assert used_blocks(driver.executor) == 0
            driver.executor.close()

    configs = (
        ExecutorConfig(enable_prefix_caching=False),
        ExecutorConfig(max_num_batched_tokens=budget),
        ExecutorConfig(max_num_seqs=2, max_num_batched_tokens=budget),
    )
    with pelton.Session(engine, threads=2, kv_blocks=blocks) as session:
        for config in configs:
            driver = Driver(Executor(session, config))
            for again in range(2):  # the second time finds a filled prefix cache
                for i, prompt in enumerate(prompts):
                    driver.executor.add(greedy(f"{again}.{i}", prompt, answers, priority=i % 2))
                    if i % 2:
                        driver.step()
                driver.drain()
                for i, want in enumerate(solo):
                    assert driver.answers[f"{again}.{i}"] == want
            assert used_blocks(driver.executor) == 0
            driver.executor.close()
