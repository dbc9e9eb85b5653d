"""An executor in its own process, so that tokenising and HTTP never hold up a step.

ZeroMQ over an ipc socket in a private temporary directory (mode 0700, removed on close); msgpack
messages. When the process dies, every open request ends with ``NotReadyError`` and ``health`` says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence

import msgspec
import zmq
import zmq.asyncio

import pelton.errors
from pelton.engine.artifact import Engine
from pelton.errors import NotReadyError, PeltonError
from pelton.runtime.client import STUCK_AFTER, Health, Mailbox, weight_epoch
from pelton.runtime.executor_loop import Abort, Add, Command, Stop, UpdateWeights, WeightsUpdated
from pelton.runtime.executor_process import Event, Failed, Ready, Step
from pelton.runtime.executor_spec import ExecutorSpec
from pelton.runtime.request import Request, RequestUpdate
from pelton.runtime.stats import ExecutorStats

#: Seconds the process gets to leave by itself before it is killed.
STOP_AFTER = 5.0


class ProcessClient:
    """``ExecutorClient`` over a process. Make one with ``await ProcessClient.start(spec)``."""

    @classmethod
    async def start(cls, spec: ExecutorSpec, *, stuck_after: float = STUCK_AFTER) -> ProcessClient:
        """Start the process and wait until its executor is loaded.

        Raises the ``PeltonError`` that loading raised there, or ``NotReadyError`` when it died."""
        client = cls(spec, stuck_after=stuck_after)
        try:
            await client._ready
        except BaseException:
            await client.close()
            raise
        return client

    def __init__(self, spec: ExecutorSpec, *, stuck_after: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._stuck_after = stuck_after
        self._mailboxes: dict[str, Mailbox] = {}
        self._failure: str | None = None
        self.max_request_tokens = 0
        self._heard = time.monotonic()
        self._stats: ExecutorStats | None = None
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._answer: asyncio.Future[WeightsUpdated] | None = None
        self._gone = asyncio.Event()
        self._closing = False
        self._encoder = msgspec.msgpack.Encoder()
        self._folder = tempfile.mkdtemp(prefix="pelton-")
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # commands are few: the entry limits requests
        address = f"ipc://{self._folder}/executor"
        self._socket.bind(address)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pelton.runtime.executor_process", address, _json(spec)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        self._reader = self._loop.create_task(self._read())
        threading.Thread(target=self._watch, name="pelton-executor-watch", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id of the executor."""
        return self._process.pid

    def submit(self, requests: Sequence[Request]) -> AsyncIterator[RequestUpdate]:
        """See ``ExecutorClient``."""
        if self._failure is not None:
            raise NotReadyError(self._failure)
        mailbox = Mailbox(request.request_id for request in requests)
        for request in requests:
            assert request.request_id not in self._mailboxes, "request ids are unique"
            self._mailboxes[request.request_id] = mailbox
            self._send(Add(request))
        return mailbox.read()

    def abort(self, request_id: str) -> None:
        """See ``ExecutorClient``."""
        mailbox = self._mailboxes.pop(request_id, None)
        if mailbox is not None:
            self._send(Abort(request_id))
            mailbox.put(RequestUpdate(request_id=request_id, finish_reason="abort"))

    async def update_weights(self, engine: Engine) -> int:
        """See ``ExecutorClient``."""
        if self._failure is not None:
            raise NotReadyError(self._failure)
        assert self._answer is None, "one update of the weights at a time"
        self._answer = self._loop.create_future()
        try:
            self._send(UpdateWeights(str(engine.path.absolute()), engine.engine_id))
            return weight_epoch(await self._answer)
        finally:
            self._answer = None

    def stats(self) -> ExecutorStats:
        """See ``ExecutorClient``."""
        assert self._stats is not None, "start() waits for the first counters"
        return self._stats

    def health(self) -> Health:
        """See ``ExecutorClient``."""
        if self._failure is not None:
            return Health(ok=False, detail=self._failure)
        silent = time.monotonic() - self._heard
        if self._stats is not None and self._stats.stuck:
            return Health(ok=False, detail="The executor runs but makes no progress.")
        if silent > self._stuck_after:
            return Health(ok=False, detail=f"The executor has given no sign of life for {silent:.0f} s.")
        return Health(ok=True)

    async def close(self) -> None:
        """See ``ExecutorClient``. The process is asked to stop, then killed after ``STOP_AFTER`` s."""
        if self._closing:
            await self._gone.wait()
            return
        self._closing = True
        if self._failure is None:
            self._send(Stop())
        try:
            await asyncio.wait_for(self._gone.wait(), STOP_AFTER)
        except TimeoutError:
            self._process.kill()
            await self._gone.wait()
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError, zmq.ZMQError):
            await self._reader
        self._socket.close()
        self._context.term()
        if self._process.stdin is not None:
            self._process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, command: Command) -> None:
        self._socket.send(self._encoder.encode(command))

    async def _read(self) -> None:
        decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
        while True:
            event = decoder.decode(await self._socket.recv())
            self._heard = time.monotonic()
            match event:
                case Ready(stats, max_request_tokens):
                    self._stats = stats
                    self.max_request_tokens = max_request_tokens
                    self._settle(None)
                case Failed(reason, error_class):
                    kind = getattr(pelton.errors, error_class, None) if error_class else None
                    if not self._ready.done() and kind is not None:
                        self._settle(_rebuild(kind, reason))
                    self._fail(f"The executor failed: {reason}")
                case WeightsUpdated():
                    if self._answer is not None and not self._answer.done():
                        self._answer.set_result(event)
                case Step(updates, stats):
                    self._stats = stats or self._stats
                    for update in updates:
                        self._deliver(update)

    def _deliver(self, update: RequestUpdate) -> None:
        mailbox = self._mailboxes.get(update.request_id)
        if mailbox is None:
            return  # aborted meanwhile
        if update.finish_reason is not None:
            del self._mailboxes[update.request_id]
        mailbox.put(update)

    def _settle(self, error: Exception | None) -> None:
        if not self._ready.done():
            if error is None:
                self._ready.set_result(None)
            else:
                self._ready.set_exception(error)

    def _fail(self, reason: str) -> None:
        if self._failure is None:
            self._failure = reason
        self._settle(NotReadyError(self._failure))
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(NotReadyError(self._failure))
        mailboxes, self._mailboxes = list(self._mailboxes.values()), {}
        for mailbox in set(mailboxes):
            mailbox.fail(self._failure)

    def _watch(self) -> None:
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._loop.create_task, self._died(code))

    async def _died(self, code: int) -> None:
        # Its last words may still be in the socket.
        await asyncio.sleep(0.05)
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        self._fail("The executor has been closed." if self._closing else f"The executor process {how}.")
        self._gone.set()


def _rebuild(kind: type[PeltonError], reason: str) -> PeltonError:
    return kind(reason)


def _json(spec: ExecutorSpec) -> str:
    return msgspec.json.encode(spec).decode()
