"""Two hundred streaming clients, some of whom leave in the middle: nothing fails, hangs or leaks."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest

from tests.serving.fake_engine import SESSION
from tests.serving.running_server import RunningServer
from tests.serving.scripted_server import ScriptedServer

CLIENTS = 200

#: Longest time any stream may take; a hung one takes forever.
PATIENCE = 120.0


def settled(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """True as soon as ``condition`` holds."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


async def one_stream(
    http: httpx.AsyncClient, rng: random.Random, max_tokens: int, seen: Counter[str]
) -> None:
    """One request: read to the end, leave after some events, or be cancelled at a random moment."""
    chat = rng.random() < 0.5
    length = rng.randint(1, max_tokens)
    text = "".join(rng.choices("abcdef ", k=rng.randint(1, 60)))
    body: dict[str, object] = {"max_tokens": length, "stream": True, "temperature": rng.choice([0, 1])}
    body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    if rng.random() < 0.1:
        body["n"] = 2
    way = rng.choice(["read", "read", "leave", "cancel"])
    leave_after = rng.randint(0, length)

    async def read() -> None:
        path = "/v1/chat/completions" if chat else "/v1/completions"
        events = 0
        async with http.stream("POST", path, json=body) as response:
            assert response.status_code == 200, await response.aread()
            last = ""
            async for line in response.aiter_lines():
                if not line:
                    continue
                last = line.removeprefix("data: ")
                assert last == "[DONE]" or "error" not in json.loads(last), last
                events += 1
                if way == "leave" and events > leave_after:
                    seen["left"] += 1
                    return
            assert last == "[DONE]", "the stream ended without [DONE]"
            seen["read"] += 1

    if way == "cancel":
        task = asyncio.ensure_future(read())
        await asyncio.sleep(rng.random() * 0.5)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            seen["cancelled"] += 1
    else:
        await asyncio.wait_for(read(), PATIENCE)


def crowd_client(url: str) -> httpx.AsyncClient:
    """The client that a crowd shares.

    Its idle connections do not expire: httpcore forgets those that it closes as expired while the request
    that made it look is cancelled, and they stay open until the garbage collector finds them."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=None)
    return httpx.AsyncClient(base_url=url, limits=limits, timeout=PATIENCE)


async def crowd(url: str, seconds: float, max_tokens: int, clients: int = CLIENTS) -> Counter[str]:
    """``clients`` of them, each sending one request after another for ``seconds``."""
    seen: Counter[str] = Counter()
    end = time.monotonic() + seconds

    async def client(number: int) -> None:
        rng = random.Random(number)
        await asyncio.sleep(rng.random() * min(2.0, seconds / 4))
        while time.monotonic() < end:
            await one_stream(http, rng, max_tokens, seen)

    async with crowd_client(url) as http:
        await asyncio.gather(*(client(i) for i in range(clients)))
    return seen


def open_connections(process: psutil.Process, url: str) -> list[str]:
    """The server's side of connections that still exist; the clients are in this process too, so it is known
    which of the two has not let go."""
    port = int(url.rsplit(":", 1)[1])
    connections = process.net_connections(kind="inet")
    clients = {c.laddr.port for c in connections if c.raddr and c.raddr.port == port}
    ours = [c for c in connections if c.laddr.port == port and c.status != psutil.CONN_LISTEN]
    side = {True: "is open", False: "is gone"}
    return [
        f"{c.raddr}: {c.status}, the client's {side[bool(c.raddr) and c.raddr.port in clients]}" for c in ours
    ]


def check_crowd(server: RunningServer, seconds: float, max_tokens: int) -> None:
    """Run the crowd and compare everything that could leak with what it was."""
    executor = psutil.Process(server.llm._client.pid)  # type: ignore[attr-defined]
    here = psutil.Process(os.getpid())
    asyncio.run(crowd(server.url, 0.5, 2, clients=CLIENTS // 10))  # whatever is made once is made now
    httpx.post(
        server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=60
    ).raise_for_status()
    assert settled(lambda: server.llm.in_flight == 0)
    files, executor_files = here.num_fds(), executor.num_fds()
    threads = executor.num_threads()

    seen = asyncio.run(crowd(server.url, seconds, max_tokens))

    assert min(seen["read"], seen["left"], seen["cancelled"]) > 0, seen

    def at_rest() -> bool:
        stats = server.llm.stats()
        return (
            server.llm.in_flight == 0
            and stats.running == stats.waiting == 0
            and all(group.used_blocks == 0 for group in stats.kv_groups)
            and not server.llm._client._mailboxes  # type: ignore[attr-defined]
        )

    assert settled(at_rest), (seen, server.llm.in_flight, server.llm.stats(), server.held())
    assert settled(lambda: not open_connections(here, server.url)), (
        open_connections(here, server.url),
        server.held(),
    )
    # This process is the clients' and pytest's too, whose few files come and go; a leak of ours would be
    # one a request or one a client.
    assert settled(lambda: here.num_fds() < files + CLIENTS / 10), (files, here.num_fds())
    assert settled(lambda: executor.num_fds() <= executor_files), (executor_files, executor.num_fds())
    assert executor.num_threads() == threads
    stats = server.llm.stats()
    assert stats.finished["error"] == 0
    response = httpx.post(
        server.url + "/v1/completions", json={"prompt": "Hello", "max_tokens": 3}, timeout=60
    )
    assert response.json()["usage"]["completion_tokens"] == 3
    assert httpx.get(server.url + "/health").status_code == 200


def test_a_crowds_client_closes_what_it_opened(fake_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is left after a crowd is then the server's."""

    async def main() -> None:
        async with ScriptedServer(fake_engine) as server:
            for turns in range(12):
                async with crowd_client(server.url) as http:
                    await asyncio.gather(*(http.get("/ready") for _ in range(4)))
                    in_an_hour = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600)
                    with monkeypatch.context() as later:
                        later.setattr("httpcore._async.http11.time", in_an_hour)
                        request = asyncio.create_task(http.get("/ready"))
                        for _ in range(turns):
                            await asyncio.sleep(0)
                        request.cancel()
                        await asyncio.wait([request])
                await server.empty()

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_a_crowd_on_the_fake_engine(fake_engine: Path, seconds: int) -> None:
    with RunningServer(fake_engine, session=SESSION, max_waiting=2 * CLIENTS) as server:
        check_crowd(server, seconds, max_tokens=40)


@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_a_crowd_on_a_real_engine(smollm2_engine: Path, seconds: int) -> None:
    with RunningServer(smollm2_engine, max_waiting=2 * CLIENTS) as server:
        check_crowd(server, seconds, max_tokens=12)
