"""Clients that go at every moment of a request, in every way: nothing of it stays with the server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.serving.scripted_server import RawClient, ScriptedServer, Way, http_request

TEXT = "/v1/completions"
STREAM = http_request(TEXT, {"prompt": "Hello", "max_tokens": 100, "stream": True})
REQUESTS = {
    "stream": STREAM,
    "chat": http_request(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100, "stream": True, "n": 2},
    ),
    "whole": http_request(TEXT, {"prompt": "Hello", "max_tokens": 100}),
}
ENDS = {"stream": b"[DONE]", "chat": b"[DONE]", "whole": b"usage"}
PARTS = [STREAM[:cut] for cut in (0, 1, STREAM.index(b"Content"), STREAM.index(b"{"), len(STREAM) - 1)]
ways = pytest.mark.parametrize("way", get_args(Way))


@contextlib.asynccontextmanager
async def answering(server: ScriptedServer, last: int | None = 8) -> AsyncIterator[None]:
    """Every turn of the loop a token for each request, which ends with its ``last`` one."""

    async def give() -> None:
        while True:
            server.executor.give("a", last=last)
            await asyncio.sleep(0)

    giving = asyncio.create_task(give())
    try:
        yield
    finally:
        giving.cancel()


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenising takes one turn of the loop, not a thread that takes as long as it likes."""

    async def to_thread(work: Callable[..., Any], *given: Any) -> Any:
        await asyncio.sleep(0)
        return work(*given)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)


@ways
@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.usefixtures("in_turn")
def test_a_client_may_go_at_any_turn_of_the_loop(fake_engine: Path, kind: str, way: Way) -> None:
    async def main() -> None:
        async with ScriptedServer(fake_engine) as server, answering(server):
            tasks = len(asyncio.all_tasks())
            turns, complete = 0, 0
            while complete < 3:
                client = RawClient(server)
                client.send(REQUESTS[kind])
                for _ in range(turns):
                    await asyncio.sleep(0)
                complete += ENDS[kind] in client.receive()
                client.leave(way)
                await server.empty()
                await server.until(lambda: len(asyncio.all_tasks()) == tasks)
                client.close()
                turns += 1
            # Some went before their request was there, some while it ran, some after.
            executor = server.executor
            assert 0 < executor.aborted < executor.submitted, (turns, executor.submitted, executor.aborted)
            assert executor.submitted < turns * (2 if kind == "chat" else 1)

    asyncio.run(main())


@ways
@pytest.mark.parametrize("before", [0, 1])
def test_a_client_may_go_with_any_part_of_a_request_sent(fake_engine: Path, before: int, way: Way) -> None:
    """``before``: requests answered on the same connection."""

    async def main() -> None:
        async with ScriptedServer(fake_engine) as server:
            for part in PARTS:
                client = RawClient(server)
                for _ in range(before):
                    client.send(STREAM)
                    await answer(server, client)
                client.send(part)
                await server.until(lambda: server.uvicorn.server_state.connections)
                for _ in range(5):
                    await asyncio.sleep(0)
                client.leave(way)
                await server.empty()
                client.close()
            assert server.executor.submitted == before * len(PARTS)

    asyncio.run(main())


@ways
@pytest.mark.parametrize("kind", REQUESTS)
def test_a_client_may_go_while_its_request_waits(fake_engine: Path, kind: str, way: Way) -> None:
    """Nothing is written on the way, so that only reading can tell."""

    async def main() -> None:
        async with ScriptedServer(fake_engine) as server:
            client = RawClient(server)
            client.send(REQUESTS[kind])
            await server.until(lambda: server.executor.mailboxes)
            client.leave(way)
            await server.empty()
            assert server.executor.aborted == server.executor.submitted
            client.close()

    asyncio.run(main())


@ways
@pytest.mark.parametrize("kind", REQUESTS)
def test_a_client_may_go_as_its_last_token_comes(fake_engine: Path, kind: str, way: Way) -> None:
    async def main() -> None:
        async with ScriptedServer(fake_engine) as server:
            for turns in range(6):
                client = RawClient(server)
                client.send(REQUESTS[kind])
                await server.until(lambda: server.executor.mailboxes)
                server.executor.give("a", last=1)
                for _ in range(turns):
                    await asyncio.sleep(0)
                client.leave(way)
                await server.empty()
                client.close()

    asyncio.run(main())


@ways
def test_a_client_may_go_that_does_not_read(fake_engine: Path, way: Way) -> None:
    """The server waits for room to write into. Half closed, it ends when the client closes."""

    async def main() -> None:
        async with ScriptedServer(fake_engine, send_buffer=4096) as server:
            client = RawClient(server, receive_buffer=4096)
            client.send(STREAM)
            await server.until(lambda: server.executor.mailboxes)
            await fill(server)
            client.leave(way)
            if way == "half-close":
                client.close()
            await server.empty()
            assert server.executor.aborted == 1

    asyncio.run(main())


@pytest.mark.parametrize("half_closed", [False, True])
def test_a_client_that_stops_reading_keeps_no_request(
    fake_engine: Path, monkeypatch: pytest.MonkeyPatch, half_closed: bool
) -> None:
    monkeypatch.setattr("pelton.serving.server.responses.STALLED", 0.05)

    async def main() -> None:
        async with ScriptedServer(fake_engine, send_buffer=4096) as server:
            client = RawClient(server, receive_buffer=4096)
            client.send(STREAM)
            await server.until(lambda: server.executor.mailboxes)
            await fill(server)
            if half_closed:
                client.leave("half-close")
            requests = server.uvicorn.server_state.tasks
            async with answering(server, last=None):  # the system may find room for a little more
                await server.until(lambda: not requests and not server.llm.in_flight)
            assert server.executor.aborted == 1
            # Its connection ends when what was written is read: cut short, as nothing else can say it.
            await server.until(lambda: not (client.receive() and server.left()))
            assert b"aaa" in client.received
            assert b"[DONE]" not in client.received
            client.close()

    asyncio.run(main())


def test_a_client_that_waits_for_tokens_has_not_stopped_reading(
    fake_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pelton.serving.server.responses.STALLED", 0.01)

    async def main() -> None:
        async with ScriptedServer(fake_engine) as server:
            client = RawClient(server)
            client.send(STREAM)
            await server.until(lambda: server.executor.mailboxes)
            for _ in range(3):
                await asyncio.sleep(0.05)
                server.executor.give("a")
            await asyncio.sleep(0.05)
            await answer(server, client, last=4)
            client.close()
            await server.empty()

    asyncio.run(main())


async def answer(server: ScriptedServer, client: RawClient, last: int = 1) -> None:
    """Give the only request its ``last`` token and wait until ``client`` has it."""
    await server.until(lambda: server.executor.mailboxes)
    server.executor.give("a", last=last)
    await server.until(lambda: b"[DONE]" in client.receive())


async def fill(server: ScriptedServer) -> None:
    """Give tokens until the server waits for room to write into."""
    connections = server.uvicorn.server_state.connections
    for connection in connections:
        connection.transport.set_write_buffer_limits(1000)
    while not any(connection.flow.write_paused for connection in connections):
        server.executor.give("a" * 200)
        await asyncio.sleep(0)


@ways
@pytest.mark.parametrize("more", [b"\r\n", STREAM], ids=["line", "request"])
def test_a_client_may_go_that_sent_more_than_its_request(fake_engine: Path, more: bytes, way: Way) -> None:
    """uvicorn stops reading behind a request, and would not see that the client goes if nobody asked."""

    async def main() -> None:
        async with ScriptedServer(fake_engine) as server:
            client = RawClient(server)
            client.send(STREAM + more)
            await server.until(lambda: server.executor.mailboxes)
            client.leave(way)
            await server.empty()
            client.close()

    asyncio.run(main())


def test_a_server_that_stops_leaves_no_request_behind(fake_engine: Path) -> None:
    async def main() -> None:
        async with ScriptedServer(fake_engine, send_buffer=4096) as server:
            clients = [RawClient(server)]
            clients[0].send(STREAM)
            await answer(server, clients[0])
            clients.append(RawClient(server, receive_buffer=4096))  # never reads
            clients[1].send(STREAM)
            await server.until(lambda: server.executor.mailboxes)
            await fill(server)
            for sent in (*REQUESTS.values(), *PARTS):
                clients.append(RawClient(server))
                clients[-1].send(sent)
            # One and one more before these, and two answers of the chat.
            await server.until(lambda: server.executor.submitted == 2 + len(REQUESTS) + 1)
            await server.until(lambda: len(server.uvicorn.server_state.connections) == len(clients))

            await server.uvicorn.shutdown()

            await server.until(lambda: not server.uvicorn.server_state.tasks and not server.llm.in_flight)
            for client, said in zip(clients[2:], (b"[DONE]", b"[DONE]", b"503"), strict=False):
                assert said in client.receive()
                assert b"has been closed" in client.received
            for client in clients:
                client.close()
            await server.empty()

    asyncio.run(main())
