"""What an operator relies on: health, metrics, keys, limits, disconnects, crashes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.serving.fake_engine import BREAK, CRASH, RAISE, SESSION
from tests.serving.running_server import RunningServer

TEXT = "/v1/completions"


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """True as soon as ``condition`` holds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


@pytest.fixture(scope="module")
def slow_server(fake_engine: Path) -> Iterator[RunningServer]:
    """Every step takes 20 ms; at most 8 run and 4 wait."""
    patch = pytest.MonkeyPatch()
    patch.setenv("FAKE_STEP_SECONDS", "0.02")
    with RunningServer(fake_engine, session=SESSION, max_waiting=4) as running:
        patch.undo()
        yield running


def idle(server: RunningServer) -> bool:
    stats = server.llm.stats()
    used = sum(group.used_blocks for group in stats.kv_groups)
    return server.llm.in_flight == stats.running == stats.waiting == used == 0


def test_models_version_and_docs(server: RunningServer, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["test-model"]
    assert client.models.retrieve("test-model").owned_by == "pelton"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert httpx.get(server.url + "/version").json() == {"version": __import__("pelton").__version__}
    assert httpx.get(server.url + "/openapi.json").status_code == 200


def test_tokenize_and_detokenize_are_inverse(server: RunningServer) -> None:
    made = httpx.post(server.url + "/tokenize", json={"prompt": "Zürich"}).json()
    assert made["tokens"] == list("Zürich".encode())
    assert made["count"] == 7
    assert made["max_model_len"] == 256
    back = httpx.post(server.url + "/detokenize", json={"tokens": made["tokens"]}).json()
    assert back == {"prompt": "Zürich"}


def test_tokenize_of_messages_is_what_a_chat_uses(server: RunningServer, client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    made = httpx.post(server.url + "/tokenize", json={"messages": messages}).json()
    usage = client.chat.completions.create(model="test-model", messages=messages, max_tokens=1).usage
    assert usage is not None
    assert usage.prompt_tokens == made["count"]


def test_health_and_ready_while_all_is_well(server: RunningServer) -> None:
    for path in ("/health", "/ready"):
        assert httpx.get(server.url + path).json() == {"status": "ok"}


def test_metrics_count_requests_and_tokens(fake_engine: Path) -> None:
    with RunningServer(fake_engine, session=SESSION) as fresh:
        for _ in range(3):
            httpx.post(fresh.url + TEXT, json={"prompt": "x" * 40, "max_tokens": 5}).raise_for_status()

        def metrics() -> dict[str, float]:
            lines = httpx.get(fresh.url + "/metrics").text.splitlines()
            pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
            return {name: float(value) for name, value in pairs}

        assert eventually(lambda: metrics()["pelton_generated_tokens_total"] == 15)
        seen = metrics()
        assert seen['pelton_host_step_seconds{quantile="0.5"}'] > 0
        assert seen["pelton_prompt_tokens_total"] == 120
        assert seen["pelton_prefix_cache_hit_tokens_total"] == 64
        assert seen["pelton_requests_running"] == seen["pelton_requests_waiting"] == 0
        assert seen["pelton_kv_usage_ratio"] == 0
        assert seen["pelton_time_to_first_token_seconds_count"] == 3
        assert seen["pelton_queue_seconds_count"] == 3
        assert seen["pelton_inter_token_seconds_count"] == 12
        assert seen["pelton_e2e_seconds_count"] == 3
        assert seen['pelton_requests_finished_total{reason="length"}'] == 3
        assert "pelton_preemptions_total" in seen


def test_keys_are_required_where_they_are_set(fake_engine: Path) -> None:
    with RunningServer(fake_engine, session=SESSION, api_keys=("sesame", "second")) as locked:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sesame"}):
            response = httpx.get(locked.url + "/v1/models", headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=locked.url + "/v1", api_key="wrong", max_retries=0).models.list()
        for key in ("sesame", "second"):
            made = openai.OpenAI(base_url=locked.url + "/v1", api_key=key, max_retries=0)
            assert made.models.list().data[0].id == "test-model"
        for probe in ("/health", "/ready"):
            assert httpx.get(locked.url + probe).status_code == 200
        assert httpx.get(locked.url + "/metrics").status_code == 401


def test_cors_is_off_unless_an_origin_is_allowed(server: RunningServer, fake_engine: Path) -> None:
    headers = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in httpx.options(server.url + TEXT, headers=headers).headers
    with RunningServer(fake_engine, session=SESSION, allow_origins=("https://app.example",)) as allowing:
        answer = httpx.options(allowing.url + TEXT, headers=headers)
        assert answer.headers["access-control-allow-origin"] == "https://app.example"


def test_a_full_queue_answers_429_and_drains(slow_server: RunningServer) -> None:
    async def main() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=slow_server.url, timeout=60) as http:
            bodies = [{"prompt": f"{i}", "max_tokens": 30} for i in range(20)]
            return await asyncio.gather(*(http.post(TEXT, json=body) for body in bodies))

    responses = asyncio.run(main())
    codes = [response.status_code for response in responses]
    assert codes.count(200) == 12
    assert codes.count(429) == 8
    refused = next(response for response in responses if response.status_code == 429)
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert eventually(lambda: idle(slow_server))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_request(slow_server: RunningServer, stream: bool) -> None:
    aborted = slow_server.llm.stats().finished["abort"]

    async def main() -> None:
        async with httpx.AsyncClient(base_url=slow_server.url) as http:
            body = {"prompt": "Hello", "max_tokens": 200, "stream": stream, "n": 2}
            if stream:
                async with http.stream("POST", TEXT, json=body, timeout=5) as response:
                    async for line in response.aiter_lines():
                        assert line
                        break
            else:
                with pytest.raises(httpx.ReadTimeout):
                    await http.post(TEXT, json=body, timeout=0.4)

    asyncio.run(main())
    # Answers of 200 tokens would take 4 s and more; counters are heard of every half second.
    assert eventually(lambda: slow_server.llm.stats().finished["abort"] == aborted + 2, 3.0)
    assert eventually(lambda: idle(slow_server)), slow_server.llm.stats()


def test_an_error_in_a_step_ends_its_request_alone(server: RunningServer) -> None:
    bad = {"prompt": [72, *RAISE], "max_tokens": 4}
    response = httpx.post(server.url + TEXT, json=bad)
    assert response.status_code == 500
    assert "the fake session was told to fail" in response.json()["error"]["message"]
    with httpx.stream("POST", server.url + TEXT, json={**bad, "stream": True}) as stream:
        events = [line for line in stream.iter_lines() if line]
    assert json.loads(events[0].removeprefix("data: "))["error"]["type"] == "server_error"
    assert events[-1] == "data: [DONE]"
    assert httpx.post(server.url + TEXT, json={"prompt": "x", "max_tokens": 1}).status_code == 200
    assert eventually(lambda: idle(server))


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (CRASH, "exited with code 7"),
        (BREAK, "The executor failed: the GPU failed (a test): an illegal address; restart to use it again"),
    ],
)
def test_a_broken_executor_ends_every_stream_and_makes_the_server_not_ready(
    fake_engine: Path, prompt: tuple[int, ...], said: str
) -> None:
    patch = pytest.MonkeyPatch()
    patch.setenv("FAKE_STEP_SECONDS", "0.02")
    with RunningServer(fake_engine, session=SESSION) as doomed:
        patch.undo()

        async def main() -> tuple[list[str], httpx.Response]:
            async with httpx.AsyncClient(base_url=doomed.url, timeout=20) as http:

                async def read() -> list[str]:
                    body = {"prompt": "Hello", "max_tokens": 200, "stream": True}
                    async with http.stream("POST", TEXT, json=body) as response:
                        return [line async for line in response.aiter_lines() if line]

                reader = asyncio.create_task(read())
                await asyncio.sleep(0.5)
                crash = await http.post(TEXT, json={"prompt": list(prompt), "max_tokens": 2})
                return await reader, crash

        lines, crash = asyncio.run(main())
        assert crash.status_code == 503
        assert said in crash.json()["error"]["message"]
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["type"] == "service_unavailable_error"
        assert lines[-1] == "data: [DONE]"
        for path in ("/health", "/ready"):
            told = httpx.get(doomed.url + path)
            assert told.status_code == 503
            assert said in told.json()["error"]["message"]
        after = httpx.post(doomed.url + TEXT, json={"prompt": "x"})
        assert after.status_code == 503
        assert after.headers["retry-after"]


def test_a_killed_executor_is_named_by_its_signal(fake_engine: Path) -> None:
    with RunningServer(fake_engine, session=SESSION) as doomed:
        os.kill(doomed.llm._client.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        assert eventually(lambda: httpx.get(doomed.url + "/health").status_code == 503)
        assert "killed by signal 9" in httpx.get(doomed.url + "/health").json()["error"]["message"]


def test_a_stuck_executor_is_not_healthy(fake_engine: Path) -> None:
    with RunningServer(fake_engine, session=SESSION) as stuck:
        client: Any = stuck.llm._client
        client._stuck_after = 1.0
        os.kill(client.pid, signal.SIGSTOP)
        try:
            assert eventually(lambda: httpx.get(stuck.url + "/health").status_code == 503)
            assert "no sign of life" in httpx.get(stuck.url + "/ready").json()["error"]["message"]
        finally:
            os.kill(client.pid, signal.SIGCONT)
        assert eventually(lambda: httpx.get(stuck.url + "/health").status_code == 200)
