"""Ways to answer: server-sent events that stop generation when the client goes, and plain answers
that do the same."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from pelton.errors import PeltonError, RequestError
from pelton.runtime.request import RequestOutput
from pelton.serving.async_llm import ChunkStream
from pelton.serving.server.errors import ClientGoneError, error_object, log

T = TypeVar("T")

#: Seconds, up to twice that, after which a client that is there and takes nothing of its stream counts as
#: gone. Its request would keep its place among those in flight, whose number is limited.
STALLED = 60.0


def json_response(body: Any, *, headers: dict[str, str] | None = None) -> Response:
    """``body`` (builtins or msgspec structs) as JSON."""
    return Response(msgspec.json.encode(body), media_type="application/json", headers=headers)


def usage(outputs: Sequence[RequestOutput], *, prompt_only: bool = False) -> dict[str, Any]:
    """OpenAI's ``usage`` of some prompts and all their answers."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    answers = (answer for output in outputs for answer in output.outputs)
    completion = 0 if prompt_only else sum(len(answer.token_ids) for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }


async def collect(request: Request, stream: ChunkStream) -> list[RequestOutput]:
    """The finished outputs of ``stream``; aborts it when the client goes first."""

    async def drain() -> None:
        async for _ in stream:
            pass

    try:
        await until_disconnect(request, drain())
    finally:
        await stream.aclose()
    return stream.generation.outputs


async def until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """The result of ``work``; cancels it and raises ``ClientGoneError`` when the client goes first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for future in (task, gone):
            future.cancel()
        with contextlib.suppress(BaseException):
            await asyncio.wait((task, gone))


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events from ``events`` (each a JSON value), ended by ``[DONE]``.

    ``close`` is called however the response ends, also when it never began: it aborts the requests. An
    error on the way is sent as an event of OpenAI's error shape. When a client stops reading for ``STALLED``
    seconds the response ends; the connection stays until the client or the network ends it (ASGI cannot)."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[Any],
        close: Callable[[], Awaitable[None]],
        headers: dict[str, str] | None = None,
    ) -> None:
        self.events = events
        self.close = close
        self.status_code = 200
        self.background = None
        self._sends = 0  # begun and ended, so that it is odd while one waits
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(self._disconnected(receive))
        try:
            stalled = False
            while not (sender.done() or gone.done() or stalled):
                sends = self._sends
                await asyncio.wait((sender, gone), timeout=STALLED, return_when=asyncio.FIRST_COMPLETED)
                stalled = sends % 2 == 1 and sends == self._sends
            if sender.done():
                sender.result()
            elif stalled and not gone.done():
                log.warning("a client has taken nothing of its stream for %.0f s: its request ends", STALLED)
        finally:
            for future in (sender, gone):
                future.cancel()
            with contextlib.suppress(BaseException):
                await asyncio.wait((sender, gone))
            await self.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def event(data: bytes, more: bool = True) -> None:
            self._sends += 1
            await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": more})
            self._sends += 1

        try:
            async for value in self.events:
                await event(msgspec.json.encode(value))
        except (OSError, asyncio.CancelledError):
            raise
        except PeltonError as error:
            await event(
                msgspec.json.encode(
                    error_object(
                        error.http_status,
                        str(error),
                        param=error.param if isinstance(error, RequestError) else None,
                    )
                )
            )
        except Exception as error:
            log.error("unexpected error in a stream", exc_info=error)
            await event(
                msgspec.json.encode(
                    error_object(500, "The server failed on this request; its log has the details.")
                )
            )
        await event(b"[DONE]", more=False)

    async def _disconnected(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
