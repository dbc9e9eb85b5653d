"""``pelton.LLM`` and ``pelton.AsyncLLM`` on the fake engine."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import pelton
from pelton.errors import ConfigError, NotReadyError, PeltonError, RequestError
from pelton.serving.llm import LLM
from tests.serving.fake_engine import RAISE, open_fake


@pytest.fixture
def fake_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are opened with the fake session."""
    monkeypatch.setattr("pelton.engine.session.Session", open_fake)


@pytest.fixture
def llm(fake_engine: Path, fake_session: None) -> Iterator[LLM]:
    with LLM(fake_engine) as made:
        yield made


def blocks_used(llm: LLM) -> int:
    return sum(group.used_blocks for group in llm.stats().kv_groups)


GREEDY = pelton.SamplingParams(temperature=0.0, max_tokens=8)


def test_one_prompt_many_prompts_and_token_ids(llm: LLM) -> None:
    (alone,) = llm.generate("Hello", GREEDY)
    texts = [out.outputs[0].text for out in llm.generate(["Hello", "Bye"], GREEDY)]
    ids = [out.outputs[0].text for out in llm.generate([list(b"Hello"), list(b"Bye")], GREEDY)]
    assert texts[0] == alone.outputs[0].text
    assert texts == ids
    assert llm.generate(list(b"Hello"), GREEDY)[0].outputs[0].text == texts[0]
    assert alone.prompt == "Hello"
    assert alone.finished


def test_outputs_are_in_order_with_each_its_params(llm: LLM) -> None:
    params = [pelton.SamplingParams(temperature=0.0, max_tokens=n) for n in (9, 2, 5)]
    outs = llm.generate(["a", "b", "c"], params)
    assert [len(out.outputs[0].token_ids) for out in outs] == [9, 2, 5]


def test_the_models_recommendations_hold_unless_given(llm: LLM) -> None:
    assert llm.sampling_params().temperature == 0.0  # the fake engine's generation defaults
    assert llm.sampling_params(temperature=0.5).temperature == 0.5
    first, second = (llm.generate("Hi")[0].outputs[0].text for _ in range(2))
    assert first == second


def test_a_stream_joins_to_the_whole(llm: LLM) -> None:
    chunks = list(llm.stream("Hello", GREEDY))
    assert "".join(c.delta for c in chunks) == llm.generate("Hello", GREEDY)[0].outputs[0].text
    assert chunks[-1].finish_reason == "length"
    assert chunks[-1].output.finished


def test_chat_is_generate_of_the_rendered_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    (out,) = llm.chat(messages, GREEDY)
    assert out.prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    many = llm.chat([messages, messages], GREEDY)
    assert [o.outputs[0].text for o in many] == [out.outputs[0].text] * 2
    assert "".join(c.delta for c in llm.stream_chat(messages, GREEDY)) == out.outputs[0].text


def test_leaving_a_stream_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream("Hello", pelton.SamplingParams(max_tokens=100))
    next(stream)
    assert blocks_used(llm) > 0
    stream.close()
    assert blocks_used(llm) == 0
    assert llm.generate("Hello", GREEDY)[0].finished


def test_interleaved_streams_do_not_mix(llm: LLM) -> None:
    whole = [llm.generate(p, GREEDY)[0].outputs[0].text for p in ("Hello", "Bye")]
    streams = [llm.stream(p, GREEDY) for p in ("Hello", "Bye")]
    texts = ["", ""]
    for pair in zip(*streams, strict=True):
        for i, chunk in enumerate(pair):
            texts[i] += chunk.delta
    assert texts == whole


def test_threads_share_the_model(llm: LLM) -> None:
    prompts = [f"prompt {i}" for i in range(12)]
    expected = [out.outputs[0].text for out in llm.generate(prompts, GREEDY)]
    got = [""] * 12

    def ask(i: int) -> None:
        got[i] = llm.generate(prompts[i], GREEDY)[0].outputs[0].text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert got == expected
    assert blocks_used(llm) == 0


@pytest.fixture
def heeds_sigterm() -> Iterator[None]:
    def end(number: int, frame: object) -> None:
        raise SystemExit(143)

    previous = signal.signal(signal.SIGTERM, end)
    yield
    signal.signal(signal.SIGTERM, previous)


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_leaves_the_model_usable(
    number: int, error: type[BaseException], llm: LLM, heeds_sigterm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = llm.generate("Hello", GREEDY)[0].outputs[0].text
    timer = threading.Timer(0.05, os.kill, (os.getpid(), number))
    step = llm._executor.step
    within = 0

    def slow_step() -> object:
        nonlocal within
        within += 1
        time.sleep(0.01)
        result = step()
        within -= 1
        return result

    monkeypatch.setattr(llm._executor, "step", slow_step)
    timer.start()
    with pytest.raises(error):
        llm.generate("Hello again", pelton.SamplingParams(max_tokens=200))
    assert within == 0, "no step was cut short"
    assert blocks_used(llm) == 0
    assert llm.generate("Hello", GREEDY)[0].outputs[0].text == expected


def test_a_failed_request_raises_and_the_next_works(llm: LLM) -> None:
    with pytest.raises(PeltonError, match="told to fail"):
        llm.generate([[72, *RAISE]], GREEDY)
    assert llm.generate("Hello", GREEDY)[0].finished


def test_what_is_wrong_is_said_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(RequestError, match="there are no prompts"):
        llm.generate([], GREEDY)
    with pytest.raises(RequestError, match=r"prompts\[1\] is None"):
        llm.generate(["a", None], GREEDY)  # type: ignore[list-item]
    for junk in (None, 5, b"abc"):
        with pytest.raises(RequestError, match=f"prompts is {junk!r}"):
            llm.generate(junk, GREEDY)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"sampling_params is \{'max_tokens': 3\}; give a SamplingParams"):
        llm.generate("x", {"max_tokens": 3})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="2 prompts and 3 sampling_params"):
        llm.generate(["a", "b"], [GREEDY] * 3)
    with pytest.raises(RequestError, match="temperature is -1"):
        llm.generate(["a", "b"], [GREEDY, pelton.SamplingParams(temperature=-1)])
    with pytest.raises(RequestError, match=r"messages\[0\] must be a mapping"):
        llm.chat(["hello"])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="no sampling parameter 'tempurature'"):
        llm.sampling_params(tempurature=1)
    assert llm.stats().steps == 0


def test_a_closed_llm_says_so(llm: LLM) -> None:
    llm.close()
    llm.close()
    with pytest.raises(NotReadyError, match="closed"):
        llm.generate("Hello")


def test_limits_of_an_engine_can_be_lowered_only(fake_engine: Path, fake_session: None) -> None:
    with LLM(fake_engine, build=pelton.BuildConfig(max_seq_len=32, max_batch_size=2)) as small:
        (out,) = small.generate("Hello")
        assert len(out.prompt_token_ids) + len(out.outputs[0].token_ids) == 32
        assert small._executor.config.max_num_seqs == 2
        # Two sequences of 32 tokens in blocks of 16, not what the engine was built for.
        assert [group.total_blocks for group in small.stats().kv_groups] == [4]
        with pytest.raises(RequestError, match="takes prompts of at most 31"):
            small.generate("x" * 40)
    for config, sentence in (
        (
            pelton.BuildConfig(max_seq_len=512),
            "built for max_seq_len 256: it can be run with less, not with 512",
        ),
        (pelton.BuildConfig(max_batch_size=0), "max_batch_size must be 1 or more, not 0"),
        (pelton.BuildConfig(dtype="bfloat16"), "built with dtype float32, so it cannot run with bfloat16"),
        (pelton.BuildConfig(block_size=32), "built with block_size 16"),
        (pelton.BuildConfig(gpu_memory_fraction=-1), "must be above 0 and at most 1, not -1"),
        (
            pelton.BuildConfig(gpu_memory_fraction="half"),  # type: ignore[arg-type]
            "gpu_memory_fraction must be a number, not 'half'",
        ),
    ):
        with pytest.raises(ConfigError, match=sentence):
            LLM(fake_engine, build=config)
    with pytest.raises(ConfigError, match="threads must be a whole number, not 'all'"):
        LLM(fake_engine, threads="all")  # type: ignore[arg-type]
    LLM(fake_engine, build=pelton.BuildConfig(dtype="float32", block_size=16)).close()


def test_async_generate_chat_and_streams(fake_engine: Path, fake_session: None) -> None:
    async def main() -> None:
        async with pelton.AsyncLLM(fake_engine) as llm:
            out = await llm.generate("Hello", GREEDY)
            text = out.outputs[0].text
            assert "".join([c.delta async for c in llm.generate("Hello", GREEDY, stream=True)]) == text
            messages = [{"role": "user", "content": "Hi"}]
            answer = await llm.chat(messages, GREEDY)
            deltas = [chunk.delta async for chunk in llm.chat(messages, GREEDY, stream=True)]
            assert "".join(deltas) == answer.outputs[0].text
            outs = await asyncio.gather(*(llm.generate(f"{i}", GREEDY) for i in range(30)))
            assert all(out.finished for out in outs)
            assert llm.in_flight == 0

    asyncio.run(main())


def test_cancelling_an_async_request_frees_it(fake_engine: Path, fake_session: None) -> None:
    async def main() -> None:
        async with pelton.AsyncLLM(fake_engine) as llm:
            task = asyncio.create_task(llm.generate("Hello", pelton.SamplingParams(max_tokens=240)))
            while llm.stats().running == 0:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert llm.in_flight == 0
            while llm.stats().running:
                await asyncio.sleep(0.01)
            assert llm.stats().finished["abort"] == 1

    asyncio.run(main())


def test_closing_an_async_llm_ends_its_streams(fake_engine: Path, fake_session: None) -> None:
    async def main() -> None:
        llm = pelton.AsyncLLM(fake_engine)
        task = asyncio.create_task(llm.generate("Hello", pelton.SamplingParams(max_tokens=240)))
        while llm.stats().running == 0:
            await asyncio.sleep(0)
        await llm.close()
        with pytest.raises(NotReadyError):
            await task
        with pytest.raises(NotReadyError):
            await llm.generate("Hello")
        assert not llm.health().ok

    asyncio.run(main())


def test_an_async_llm_outlives_one_event_loop(fake_engine: Path, fake_session: None) -> None:
    llm = pelton.AsyncLLM(fake_engine)
    texts = [asyncio.run(llm.generate("Hello", GREEDY)).outputs[0].text for _ in range(2)]
    assert texts[0] == texts[1]
    asyncio.run(llm.close())
