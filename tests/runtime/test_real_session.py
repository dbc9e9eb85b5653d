"""Solo = batched = chunked = cached = preempted on a built engine: greedy, float32, freed blocks poisoned
with NaN."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from pelton.builder.build import build
from pelton.engine.config import BuildConfig
from pelton.engine.session import Session
from pelton.runtime.config import ExecutorConfig
from pelton.runtime.executor import Executor
from tests.builder.random_checkpoint import TINY_LLAMA, RandomCheckpoint
from tests.runtime.test_executor import assert_idle, drain, make_request, tokens_of

TINY_GEMMA3 = {
    **TINY_LLAMA,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 3,
    "head_dim": 16,
    "sliding_window": 10,
    "query_pre_attn_scalar": 16,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_local_base_freq": 10000.0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
CONFIGS = {"llama": TINY_LLAMA, "gemma3": TINY_GEMMA3}


@pytest.fixture(scope="module", params=CONFIGS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("engines") / f"{request.param}.engine"
    config = BuildConfig(
        block_size=8, max_batch_size=4, max_num_tokens=40, dtype="float32", kv_dtype="float32"
    )
    build(RandomCheckpoint(CONFIGS[request.param]), config, output=output)
    return output


class PoisoningSession(Session):
    """Fills freed blocks with NaN, so that reading one shows."""

    def poison_blocks(self, group: int, blocks: Sequence[int]) -> None:
        for layer in self.config.model.kv_groups[group].layers:
            for cache in (self._caches.k[layer], self._caches.v[layer]):
                cache[list(blocks)] = np.nan


@pytest.fixture(scope="module", params=["auto", pytest.param("reference", marks=pytest.mark.slow)])
def runner(request: pytest.FixtureRequest) -> str:
    """``auto`` is native where the library is there."""
    return str(request.param)


@pytest.fixture
def open_executor(engine: Path, runner: str) -> Iterator[object]:
    sessions = []

    def open_one(kv_blocks: int, **config: int | bool) -> Executor:
        session = PoisoningSession(engine, kv_blocks=kv_blocks, threads=1, runner=runner)  # type: ignore[arg-type]
        sessions.append(session)
        return Executor(session, ExecutorConfig(**config))  # type: ignore[arg-type]

    yield open_one
    for session in sessions:
        session.close()


def prompts() -> dict[str, list[int]]:
    rng = np.random.default_rng(0)
    shared = rng.integers(10, 101, 40).tolist()
    cut = [1, 2, 8, 15, 16, 17, 24, 33, 40]
    return {f"p{n}": [*shared[:n], *rng.integers(10, 101, n % 5).tolist()] for n in cut}


@pytest.mark.parametrize("way", ["batched", "one token a step", "cached", "preempted"])
def test_the_way_of_computing_does_not_change_the_answer(way: str, open_executor: object) -> None:
    assert callable(open_executor)
    solo = {}
    alone = open_executor(16, enable_prefix_caching=False)
    for name, prompt in prompts().items():
        alone.add(make_request(name, prompt, max_tokens=14, logprobs=0, ignore_eos=True))
        solo[name] = drain(alone)[name]
    assert all(len(tokens_of(updates)) == 14 for updates in solo.values())
    executor = {
        "batched": lambda: open_executor(64, enable_prefix_caching=False),
        "one token a step": lambda: open_executor(64, max_num_batched_tokens=1, enable_prefix_caching=False),
        "cached": lambda: open_executor(64),
        "preempted": lambda: open_executor(9),
    }[way]()
    for turn in range(2):
        for name, prompt in prompts().items():
            request = make_request(f"{name}/{turn}", prompt, max_tokens=14, logprobs=0, ignore_eos=True)
            executor.add(request)
        updates = drain(executor)
        for name in prompts():
            got = updates[f"{name}/{turn}"]
            assert tokens_of(got) == tokens_of(solo[name])
            ours = [u.logprobs[0].logprobs[0] for u in got]
            assert ours == pytest.approx([u.logprobs[0].logprobs[0] for u in solo[name]], abs=1e-4)
    stats = executor.stats()
    assert (stats.prefix_hit_tokens > 0) == (way in ("cached", "preempted"))
    assert (stats.preemptions > 0) == (way == "preempted")
    assert_idle(executor)
