"""An executor in a thread of this process: ``AsyncLLM`` embedded in someone's program."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
import time
from collections.abc import AsyncIterator, Iterable, Sequence

from pelton.engine.artifact import Engine
from pelton.errors import NotReadyError
from pelton.runtime.client import STUCK_AFTER, Health, Mailbox, weight_epoch
from pelton.runtime.executor import Executor
from pelton.runtime.executor_loop import Abort, Add, Command, Stop, UpdateWeights, WeightsUpdated, run_loop
from pelton.runtime.executor_spec import close_executor
from pelton.runtime.request import Request, RequestUpdate
from pelton.runtime.stats import ExecutorStats


class ThreadClient:
    """``ExecutorClient`` over a thread. Owns ``executor`` from now on.

    Methods may be called from any event loop; updates reach each mailbox on its own loop."""

    def __init__(self, executor: Executor, *, stuck_after: float = STUCK_AFTER) -> None:
        self._executor = executor
        self._stuck_after = stuck_after
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._mailboxes: dict[str, Mailbox] = {}
        self._failure: str | None = None
        self._answer: concurrent.futures.Future[WeightsUpdated] | None = None
        self._progress = time.monotonic()
        self._stats = executor.stats()
        self.max_request_tokens = executor.max_request_tokens
        self._thread = threading.Thread(target=self._run, name="pelton-executor", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> AsyncIterator[RequestUpdate]:
        """See ``ExecutorClient``."""
        mailbox = Mailbox(request.request_id for request in requests)
        with self._lock:
            if self._failure is not None:
                raise NotReadyError(self._failure)
            for request in requests:
                assert request.request_id not in self._mailboxes, "request ids are unique"
                self._mailboxes[request.request_id] = mailbox
        for request in requests:
            self._commands.put(Add(request))
        return mailbox.read()

    def abort(self, request_id: str) -> None:
        """See ``ExecutorClient``."""
        with self._lock:
            mailbox = self._mailboxes.pop(request_id, None)
        if mailbox is not None:
            self._commands.put(Abort(request_id))
            _post(mailbox, RequestUpdate(request_id=request_id, finish_reason="abort"))

    async def update_weights(self, engine: Engine) -> int:
        """See ``ExecutorClient``."""
        answer: concurrent.futures.Future[WeightsUpdated] = concurrent.futures.Future()
        with self._lock:
            if self._failure is not None:
                raise NotReadyError(self._failure)
            assert self._answer is None, "one update of the weights at a time"
            self._answer = answer
        self._commands.put(UpdateWeights(str(engine.path.absolute()), engine.engine_id))
        return weight_epoch(await asyncio.wrap_future(answer))

    def stats(self) -> ExecutorStats:
        """See ``ExecutorClient``."""
        return self._stats

    def health(self) -> Health:
        """See ``ExecutorClient``."""
        if self._failure is not None:
            return Health(ok=False, detail=self._failure)
        stalled = time.monotonic() - self._progress
        if self._mailboxes and stalled > self._stuck_after:
            return Health(ok=False, detail=f"The executor has made no progress for {stalled:.0f} s.")
        return Health(ok=True)

    async def close(self) -> None:
        """See ``ExecutorClient``."""
        self._commands.put(Stop())
        await asyncio.to_thread(self._thread.join)

    def _receive(self, wait: bool) -> Iterable[Command]:
        if wait:
            yield self._commands.get()
        self._progress = time.monotonic()
        while True:
            try:
                yield self._commands.get_nowait()
            except queue.Empty:
                return

    def _send(self, updates: list[RequestUpdate]) -> None:
        self._progress = time.monotonic()
        self._stats = self._executor.stats()
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, RequestUpdate]]] = {}
        with self._lock:
            for update in updates:
                mailbox = self._mailboxes.get(update.request_id)
                if mailbox is None:
                    continue  # aborted meanwhile
                by_loop.setdefault(mailbox.loop, []).append((mailbox, update))
                if update.finish_reason is not None:
                    del self._mailboxes[update.request_id]
        for loop, items in by_loop.items():
            _call(loop, items)

    def _take_answer(self) -> concurrent.futures.Future[WeightsUpdated] | None:
        with self._lock:
            answer, self._answer = self._answer, None
        return answer if answer is not None and answer.set_running_or_notify_cancel() else None

    def _weights_updated(self, result: WeightsUpdated) -> None:
        if answer := self._take_answer():
            answer.set_result(result)

    def _run(self) -> None:
        failure = "The executor has been closed."
        try:
            run_loop(self._executor, self._receive, self._send, self._weights_updated)
        except BaseException as error:  # nothing may leave readers waiting
            failure = f"The executor failed: {type(error).__name__}: {error}"
            import logging

            logging.getLogger("pelton").exception("the executor failed")
        with self._lock:
            self._failure = failure
            mailboxes, self._mailboxes = list(self._mailboxes.values()), {}
        if answer := self._take_answer():
            answer.set_exception(NotReadyError(failure))
        for mailbox in set(mailboxes):
            with contextlib.suppress(RuntimeError):  # its loop is closed: nobody is left to read
                mailbox.loop.call_soon_threadsafe(mailbox.fail, failure)
        close_executor(self._executor)


def _deliver(items: list[tuple[Mailbox, RequestUpdate]]) -> None:
    for mailbox, update in items:
        mailbox.put(update)


def _call(loop: asyncio.AbstractEventLoop, items: list[tuple[Mailbox, RequestUpdate]]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to read
        loop.call_soon_threadsafe(_deliver, items)


def _post(mailbox: Mailbox, update: RequestUpdate) -> None:
    _call(mailbox.loop, [(mailbox, update)])
