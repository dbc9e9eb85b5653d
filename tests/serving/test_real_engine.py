"""The whole way on a real model: GGUF -> engine -> server -> the official client."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import pelton
from tests.cli.test_footprint import NO_TORCH
from tests.serving.running_server import RunningServer

MESSAGES: Any = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


@pytest.fixture(scope="module")
def server(smollm2_engine: Path) -> Iterator[RunningServer]:
    with RunningServer(smollm2_engine) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"messages": MESSAGES, "model": "test-model", "temperature": 0, "max_tokens": 24} | fields
    return client.chat.completions.create(**fields)


def test_it_knows_the_capital_of_france_and_stops(client: openai.OpenAI) -> None:
    choice = ask(client, max_tokens=40).choices[0]
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"
    assert "<|im_end|>" not in choice.message.content


def test_streams_and_batches_give_the_same_greedy_answer(client: openai.OpenAI) -> None:
    alone = ask(client).choices[0].message.content
    streamed = "".join(c.choices[0].delta.content or "" for c in ask(client, stream=True))
    together = [c.message.content for c in ask(client, n=4).choices]
    assert streamed == alone
    assert together == [alone] * 4


def test_the_server_the_command_and_python_agree(client: openai.OpenAI, smollm2_engine: Path) -> None:
    served = ask(client).choices[0].message.content
    with pelton.LLM(smollm2_engine) as llm:
        params = llm.sampling_params(temperature=0.0, max_tokens=24)
        (out,) = llm.chat(MESSAGES, params)
    command = [sys.executable, "-c", NO_TORCH + "from pelton.serving.cli.main import main\nmain()", "run"]
    command += [str(smollm2_engine), MESSAGES[0]["content"], "--temperature", "0", "--max-tokens", "24"]
    env = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=True)
    assert done.stderr == ""
    assert done.stdout == out.outputs[0].text + "\n"
    assert out.outputs[0].text == served


def test_text_that_is_no_ascii_streams_whole(server: RunningServer, client: openai.OpenAI) -> None:
    """Which seed gives such text goes by rounding, so by the tactics that a build has timed."""
    prompt = "Über Österreich 🙂 日本語: "
    texts = []
    for seed in range(7, 13):
        text, ids = "", []
        for event in client.completions.create(
            model="test-model",
            prompt=prompt,
            max_tokens=60,
            temperature=1.5,
            seed=seed,
            stream=True,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        ):
            text += event.choices[0].text
            ids += (event.choices[0].model_extra or {})["token_ids"]
        assert len(ids) == 60
        body = {"tokens": ids, "skip_special_tokens": True}
        assert httpx.post(server.url + "/detokenize", json=body).json()["prompt"] == text
        texts.append(text)
    assert not all(text.isascii() for text in texts)


def test_logprobs_of_an_echoed_prompt_are_likely_for_likely_text(client: openai.OpenAI) -> None:
    def score(text: str) -> float:
        record = (
            client.completions.create(model="test-model", prompt=text, max_tokens=0, echo=True, logprobs=0)
            .choices[0]
            .logprobs
        )
        assert record is not None
        assert record.tokens is not None
        assert "".join(record.tokens) == text
        return sum(value for value in record.token_logprobs or () if value is not None)

    assert score("The cat sat on the mat.") > score("The mat the sat cat on.") + 5


def test_tokenize_matches_usage(server: RunningServer, client: openai.OpenAI) -> None:
    count = httpx.post(server.url + "/tokenize", json={"messages": MESSAGES}).json()["count"]
    assert ask(client, max_tokens=1).usage.prompt_tokens == count
