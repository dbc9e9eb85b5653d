"""New weights in a model that serves: streams go on, nothing of the old weights is used for new ones."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import pelton
from pelton.engine.artifact import open_engine
from pelton.errors import CheckpointError, ConfigError, EngineError, NotReadyError
from pelton.runtime.client_thread import ThreadClient
from pelton.runtime.request import RequestOutput, SamplingParams
from pelton.serving.async_llm import AsyncLLM
from tests.serving.running_server import RunningServer
from tests.serving.tiny_model import TextCheckpoint, build_tiny

STREAMS, LENGTH = 16, 300
GREEDY = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[256, *range(60, 80), 100 + i] for i in range(STREAMS)]
#: Longer than a KV block, and like no other prompt.
CACHED = [256, *range(200, 240)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def old(folder: Path) -> Path:
    return build_tiny(folder, 1)


@pytest.fixture(scope="module")
def new(folder: Path) -> Path:
    return build_tiny(folder, 2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PELTON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@asynccontextmanager
async def opened(engine: Path, where: str) -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM(engine) if where == "thread" else await AsyncLLM.start(engine)
    async with llm:
        yield llm


def ids(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def answers(engine: Path, prompts: Sequence[Sequence[int]], params: Any) -> list[list[int]]:
    with pelton.LLM(engine) as llm:
        return [ids(output) for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("where", ["thread", "process"])
def test_streams_go_on_with_the_new_weights(old: Path, new: Path, where: str) -> None:
    async def main() -> tuple[list[list[int]], list[int], list[int], list[Any], int]:
        async with opened(old, where) as llm:
            before = await llm.generate(CACHED, SHORT)
            assert (await llm.generate(CACHED, SHORT)).num_cached_tokens > 0, "it is cached"
            got: list[list[int]] = [[] for _ in PROMPTS]
            under_way = asyncio.Event()

            async def read(i: int) -> str | None:
                reason = None
                async for chunk in llm.generate(PROMPTS[i], GREEDY, stream=True):
                    got[i] += chunk.token_ids
                    reason = chunk.finish_reason
                    if all(len(tokens) > 3 for tokens in got):
                        under_way.set()
                return reason

            readers = [asyncio.create_task(read(i)) for i in range(STREAMS)]
            await under_way.wait()
            at_call = [len(tokens) for tokens in got]
            assert await llm.refit(new) == 1
            at_return = [len(tokens) for tokens in got]
            after = await llm.generate(CACHED, SHORT)
            again = await llm.generate(CACHED, SHORT)
            assert await asyncio.gather(*readers) == ["length"] * STREAMS
            assert llm.stats().weight_epoch == 1
            assert [g.used_blocks for g in llm.stats().kv_groups] == [0]
            assert llm.health().ok
            return got, at_call, at_return, [before, after, again], llm.stats().preemptions

    # On a busy machine the executor may be through with the streams before this process asks for the refit.
    for _ in range(6):
        got, at_call, at_return, (before, after, again), preemptions = asyncio.run(main())
        if max(at_return) < LENGTH and preemptions >= STREAMS:
            break
    else:
        pytest.fail(f"the refit came too late to be a test, or stopped {preemptions} of {STREAMS} streams")
    assert [len(tokens) for tokens in got] == [LENGTH] * STREAMS
    # New requests see the new weights, and no block of the old ones.
    fresh = answers(new, [CACHED], SHORT)[0]
    assert ids(after) == fresh == ids(again)
    assert ids(before) == answers(old, [CACHED], SHORT)[0] != fresh
    assert after.num_cached_tokens == 0
    assert again.num_cached_tokens > 0
    # Each stream is the old model's answer up to some token, and from there on what the new model says
    # to all tokens before: with KV of both models it would be neither's.
    splits = [
        next((k for k in range(LENGTH) if tokens[k] != old_answer[k]), LENGTH - 1)
        for tokens, old_answer in zip(got, answers(old, PROMPTS, GREEDY), strict=True)
    ]
    assert all(first <= k for first, k in zip(at_call, splits, strict=True))
    rests = answers(
        new,
        [[*prompt, *tokens[:k]] for prompt, tokens, k in zip(PROMPTS, got, splits, strict=True)],
        [SamplingParams(temperature=0.0, max_tokens=LENGTH - k, ignore_eos=True) for k in splits],
    )
    assert rests == [tokens[k:] for tokens, k in zip(got, splits, strict=True)]
    assert sum(k < LENGTH - 1 for k in splits) > STREAMS // 2, "the models differ"


def test_an_llm_takes_checkpoints_engines_and_arrays(
    old: Path, new: Path, cache: Path, tmp_path: Path
) -> None:
    checkpoint = TextCheckpoint(2)
    arrays = {name: checkpoint.read(name).data for name in checkpoint.tensors}
    wanted, before = answers(new, PROMPTS, SHORT), answers(old, PROMPTS, SHORT)
    for weights in (new, checkpoint.save(tmp_path / "hf"), arrays):
        with pelton.LLM(old) as llm:
            assert [ids(o) for o in llm.generate(PROMPTS, SHORT)] == before
            llm.refit(weights)
            assert [ids(o) for o in llm.generate(PROMPTS, SHORT)] == wanted
            llm.refit(old)
            assert [ids(o) for o in llm.generate(PROMPTS, SHORT)] == before
        assert not list(cache.glob("refits/*")), "what was made for it is gone"


def test_named_arrays_add_up(old: Path, new: Path) -> None:
    checkpoint = TextCheckpoint(2)
    with pelton.LLM(old) as llm:
        for layer in ("layers.0.", "layers.1.", "norm.weight", "embed_tokens"):
            part = {n: checkpoint.read(n).data for n in checkpoint.tensors if layer in n}
            llm.refit(part)
        assert [ids(o) for o in llm.generate(PROMPTS, SHORT)] == answers(new, PROMPTS, SHORT)


def bad_dtype(checkpoint: TextCheckpoint) -> Any:
    return {"model.norm.weight": np.zeros(64, np.int8)}


def bad_shape(checkpoint: TextCheckpoint) -> Any:
    return {"model.norm.weight": np.zeros(63, np.float32)}


def only_q(checkpoint: TextCheckpoint) -> Any:
    name = "model.layers.0.self_attn.q_proj.weight"
    return {name: checkpoint.read(name).data}


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        (
            bad_dtype,
            CheckpointError,
            "model.norm.weight is int8; give an array of float32, ",
        ),
        (bad_shape, CheckpointError, "model.norm.weight is 63, and .* was built from 64"),
        (only_q, CheckpointError, r"has no tensor model.layers.0.self_attn.k_proj.weight and 1 more"),
        (lambda c: {}, ConfigError, "there are no arrays"),
        (
            lambda c: {"lm_tail": np.zeros(3, np.float32)},
            ConfigError,
            "no weight .* has a name like 'lm_tail'",
        ),
        (lambda c: "/nowhere.gguf", CheckpointError, "there is no /nowhere.gguf"),
    ],
)
def test_refused_weights_change_nothing(
    old: Path, weights: Callable[[TextCheckpoint], Any], error: type[Exception], message: str
) -> None:
    with pelton.LLM(old) as llm:
        before = [ids(o) for o in llm.generate(PROMPTS, SHORT)]
        with pytest.raises(error, match=message):
            llm.refit(weights(TextCheckpoint(2)))
        assert llm.stats().weight_epoch == 0
        assert [ids(o) for o in llm.generate(PROMPTS, SHORT)] == before


@pytest.mark.parametrize("where", ["thread", "process"])
def test_an_engine_of_another_plan_or_damaged_is_refused(
    old: Path, new: Path, tmp_path: Path, where: str
) -> None:
    other = build_tiny(tmp_path, 1, intermediate_size=64)
    damaged = tmp_path / "damaged.engine"
    shutil.copytree(new, damaged)
    shard = next((damaged / "weights").iterdir())
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)

    async def main() -> None:
        async with opened(old, where) as llm:
            before = ids(await llm.generate(CACHED, SHORT))
            with pytest.raises(EngineError, match=r"has another plan than the running .*; start"):
                await llm.refit(other)
            with pytest.raises(EngineError, match="does not have the SHA-256"):
                await llm.refit(damaged)
            assert llm.health().ok
            assert ids(await llm.generate(CACHED, SHORT)) == before

    asyncio.run(main())


def test_a_failure_half_way_leaves_it_not_ready(
    old: Path, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("pelton.runtime.executor.Executor.recompute_all", fail)

    async def main() -> None:
        async with opened(old, "thread") as llm:
            assert isinstance(llm._client, ThreadClient)
            stream = llm.generate(CACHED, GREEDY, stream=True)
            await anext(stream)
            with pytest.raises(NotReadyError, match="The executor failed: RuntimeError: no"):
                await llm.refit(new)
            assert not llm.health().ok
            with pytest.raises(NotReadyError, match="RuntimeError: no"):
                async for _ in stream:
                    pass
            with pytest.raises(NotReadyError, match="RuntimeError: no"):
                await llm.generate(CACHED, SHORT)

    asyncio.run(main())
    with pelton.LLM(old) as llm:
        with pytest.raises(NotReadyError, match="the weights could not be replaced: RuntimeError: no"):
            llm.refit(new)
        with pytest.raises(NotReadyError, match="the weights could not be replaced"):
            llm.generate(CACHED, SHORT)


def test_the_server_takes_new_weights_only_when_told_to(old: Path, new: Path, tmp_path: Path) -> None:
    checkpoint = str(TextCheckpoint(2).save(tmp_path / "hf"))
    body = {
        "prompt": CACHED,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }

    def ask(url: str) -> list[int]:
        answer = httpx.post(url + "/v1/completions", json=body, timeout=30).json()
        return list(answer["choices"][0]["token_ids"])

    with RunningServer(old) as closed:
        assert httpx.post(closed.url + "/engine/refit", json={"path": checkpoint}).status_code == 404
    with RunningServer(old, enable_refit=True) as server:
        assert ask(server.url) == answers(old, [CACHED], SHORT)[0]
        for path, sentence in (
            ("/nowhere.gguf", "there is no /nowhere.gguf"),
            ("a/b", "no path on the server's"),
        ):
            refused = httpx.post(server.url + "/engine/refit", json={"path": path})
            assert refused.status_code == 400
            assert sentence in refused.json()["error"]["message"]
        done = httpx.post(server.url + "/engine/refit", json={"path": checkpoint}, timeout=30)
        assert done.status_code == 200, done.text
        assert done.json()["weight_epoch"] == 1
        assert ask(server.url) == answers(new, [CACHED], SHORT)[0]
        assert "pelton_weight_epoch 1.0" in httpx.get(server.url + "/metrics").text
        assert httpx.get(server.url + "/ready").status_code == 200


def test_two_sessions_share_an_engine_until_one_is_refitted(old: Path, new: Path) -> None:
    engine = open_engine(old)
    with pelton.Session(engine, kv_blocks=8) as a, pelton.Session(engine, kv_blocks=8) as b:
        name = "model.norm.weight"
        assert np.shares_memory(a.engine.weights[name], b.engine.weights[name])
        before = b.engine.weights[name].tobytes()
        a.update_weights(open_engine(new))
        assert a.engine.weights[name].tobytes() != before
        assert b.engine.weights[name].tobytes() == before
        assert (a.weight_epoch, b.weight_epoch) == (1, 0)
        assert a.engine_id != b.engine_id
