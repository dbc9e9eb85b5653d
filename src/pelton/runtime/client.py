"""How a front end reaches an executor: the same interface in this process or across two.

A client is asynchronous and knows tokens only. Each submitted request gets a ``Mailbox``; the
executor's side fills mailboxes step by step, the front end reads them one update at a time. A
mailbox holds at most one answer's tokens, and the number of requests is limited where they enter
(``serving.async_llm``), so what is buffered is bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Protocol

import msgspec

import pelton.errors
from pelton.engine.artifact import Engine
from pelton.errors import NotReadyError, PeltonError
from pelton.runtime.executor_loop import WeightsUpdated
from pelton.runtime.request import Request, RequestUpdate
from pelton.runtime.stats import ExecutorStats

#: Seconds without a sign of progress, while there is work, after which an executor counts as stuck.
STUCK_AFTER = 60.0


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the executor makes progress; ``detail`` is a sentence when it does not."""

    ok: bool
    detail: str = ""


class ExecutorClient(Protocol):
    """What a front end needs of an executor."""

    max_request_tokens: int
    """Most tokens, prompt and answer, that one request may have."""

    def submit(self, requests: Sequence[Request]) -> AsyncIterator[RequestUpdate]:
        """Queue ``requests`` now; the iterator yields their updates, interleaved, and ends when each
        had one with a finish reason.

        Leaving the iterator early does not abort: call ``abort``. Raises ``NotReadyError``, here or
        while iterating, when the executor has stopped."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request; its last update has finish reason ``abort``. Unknown and finished ids are
        ignored."""
        ...

    def stats(self) -> ExecutorStats:
        """The newest counters heard from the executor."""
        ...

    def health(self) -> Health:
        """Whether the executor is alive and, when it has work, getting on with it."""
        ...

    async def update_weights(self, engine: Engine) -> int:
        """Run the weights of ``engine``, whose files were verified, from the next step on; one call at a
        time. Returns the new weight epoch.

        Raises ``EngineError`` when the executor refuses it and goes on with the weights it has, and
        ``NotReadyError`` when it has stopped."""
        ...

    async def close(self) -> None:
        """Stop the executor and free everything; open iterators end with ``NotReadyError``."""
        ...


def weight_epoch(answer: WeightsUpdated) -> int:
    """The epoch that ``answer`` tells, or the error."""
    if answer.error:
        kind = getattr(pelton.errors, answer.error_class, PeltonError)
        raise kind(answer.error)
    return answer.weight_epoch


class Mailbox:
    """Updates of some requests on their way to one reader; filled and read on one event loop."""

    def __init__(self, request_ids: Iterable[str]) -> None:
        self.loop = asyncio.get_running_loop()
        self._open = set(request_ids)
        self._updates: list[RequestUpdate] = []
        self._error: str | None = None
        self._wake = asyncio.Event()

    def put(self, update: RequestUpdate) -> None:
        """Add an update."""
        self._updates.append(update)
        self._wake.set()

    def fail(self, reason: str) -> None:
        """End the reader with ``NotReadyError``, after what was already delivered."""
        self._error = reason
        self._wake.set()

    async def read(self) -> AsyncIterator[RequestUpdate]:
        """Yield updates until every request has finished."""
        while self._open:
            if not self._updates and self._error is not None:
                raise NotReadyError(self._error)
            await self._wake.wait()
            self._wake.clear()
            updates, self._updates = self._updates, []
            for update in updates:
                if update.finish_reason is not None:
                    self._open.discard(update.request_id)
                yield update
