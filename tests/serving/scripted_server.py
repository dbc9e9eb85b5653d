"""A server without an executor, in the test's own event loop: answers come when the test says so, and
whatever is left of a request can be seen between two turns of the loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import uvicorn

from pelton.engine.artifact import Engine, open_engine
from pelton.runtime.client import Health, Mailbox
from pelton.runtime.request import Request, RequestUpdate
from pelton.runtime.stats import ExecutorStats
from pelton.runtime.tokenizer import Tokenizer
from pelton.serving.async_llm import AsyncLLM
from pelton.serving.server.app import create_app
from pelton.serving.server.launch import KEEP_ALIVE, _Server, bind
from pelton.serving.server.settings import ServerSettings
from tests.serving.held import held_by

#: How a client goes: it closes its socket, resets the connection, or says that it will send no more.
Way = Literal["close", "reset", "half-close"]


class ScriptedExecutor:
    """An ``ExecutorClient`` that gives its requests tokens when it is told to."""

    max_request_tokens = 256

    def __init__(self) -> None:
        self.mailboxes: dict[str, Mailbox] = {}
        self._given: Counter[str] = Counter()
        self.submitted = 0
        self.aborted = 0

    def submit(self, requests: Sequence[Request]) -> AsyncIterator[RequestUpdate]:
        mailbox = Mailbox(request.request_id for request in requests)
        self.mailboxes.update({request.request_id: mailbox for request in requests})
        self.submitted += len(requests)
        return mailbox.read()

    def abort(self, request_id: str) -> None:
        mailbox = self.mailboxes.pop(request_id, None)
        if mailbox is not None:
            self.aborted += 1
            mailbox.put(RequestUpdate(request_id=request_id, finish_reason="abort"))

    def give(self, text: str, *, last: int | None = None) -> None:
        """Every request gets the bytes of ``text`` as tokens; its ``last``-th time is its end."""
        for request_id, mailbox in list(self.mailboxes.items()):
            self._given[request_id] += 1
            ends = self._given[request_id] == last
            mailbox.put(
                RequestUpdate(
                    request_id=request_id,
                    new_token_ids=tuple(text.encode()),
                    finish_reason="stop" if ends else None,
                )
            )
            if ends:
                del self.mailboxes[request_id]

    def stats(self) -> ExecutorStats:
        raise NotImplementedError

    def health(self) -> Health:
        return Health(ok=True)

    async def update_weights(self, engine: Engine) -> int:
        raise NotImplementedError

    async def close(self) -> None:
        mailboxes, self.mailboxes = list(self.mailboxes.values()), {}
        for mailbox in mailboxes:
            mailbox.fail("The executor has been closed.")


class ScriptedServer:
    """``pelton serve``'s application and server on a free port of the running event loop."""

    def __init__(self, engine: Path, *, send_buffer: int | None = None) -> None:
        self.executor = ScriptedExecutor()
        opened = open_engine(engine)
        self.llm = AsyncLLM.__new__(AsyncLLM)
        self.llm._setup(
            Tokenizer.from_dir(opened.tokenizer_path), opened.config, self.executor, 256, opened.path
        )
        self._bound = bind("127.0.0.1", 0)
        if send_buffer is not None:
            self._bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        config = uvicorn.Config(
            create_app(self.llm, ServerSettings(model_ids=("test-model",))),
            log_config=None,
            lifespan="off",
            ws="none",
            timeout_keep_alive=KEEP_ALIVE,
        )
        config.timeout_graceful_shutdown = 0.2  # type: ignore[assignment]
        config.load()
        self.uvicorn = _Server(config, self.llm, drain_seconds=0)
        self.uvicorn.lifespan = config.lifespan_class(config)

    async def __aenter__(self) -> ScriptedServer:
        await self.uvicorn.startup(sockets=[self._bound])
        self.address = self._bound.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        return self

    async def __aexit__(self, *raised: object) -> None:
        for listener in self.uvicorn.servers:
            listener.close()
        await self.llm.close()

    def left(self) -> list[str]:
        """What is left of requests, in words; nothing when all is as it was."""
        lines = held_by(self.uvicorn)
        if self.llm.in_flight or self.executor.mailboxes:
            lines.append(f"{self.llm.in_flight} in flight, {len(self.executor.mailboxes)} at the executor")
        return lines

    async def until(self, condition: Callable[[], Any], seconds: float = 20.0) -> None:
        """Turn the loop until ``condition`` holds; says what is left when it never does."""
        end = asyncio.get_running_loop().time() + seconds
        while not condition():
            assert asyncio.get_running_loop().time() < end, self.left() or "nothing is left"
            await asyncio.sleep(0)

    async def empty(self) -> None:
        """Wait until no connection, task or request is left."""
        await self.until(lambda: not self.left())


class RawClient:
    """A client that is nothing but a socket."""

    def __init__(self, server: ScriptedServer, *, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.connect(server.address)
        self.socket.setblocking(False)
        self.received = b""

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self) -> bytes:
        """Everything that has come so far."""
        with contextlib.suppress(BlockingIOError):
            while data := self.socket.recv(1 << 16):
                self.received += data
        return self.received

    def leave(self, way: Way) -> None:
        if way == "half-close":
            self.socket.shutdown(socket.SHUT_WR)
            return
        if way == "reset":
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def close(self) -> None:
        self.socket.close()


def http_request(path: str, body: dict[str, Any]) -> bytes:
    """A POST with ``body`` as JSON."""
    encoded = msgspec.json.encode(body)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(encoded)}\r\n\r\n".encode() + encoded
