"""An executor in a process of its own: ``python -m pelton.runtime.executor_process ADDRESS SPEC``.

Started by ``ProcessClient``, which holds the other end of the ZeroMQ socket and of standard input.
Standard input carries nothing: its end of file says that the parent is gone, however it died, and
then this process leaves at once, so none is ever orphaned. Interrupts from the terminal are the
parent's to handle (this process leads its own session).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable

import msgspec

from pelton.errors import PeltonError
from pelton.runtime.executor import Executor
from pelton.runtime.executor_loop import Command, WeightsUpdated, run_loop
from pelton.runtime.executor_spec import ExecutorSpec, close_executor
from pelton.runtime.request import RequestUpdate
from pelton.runtime.stats import ExecutorStats

#: Seconds between signs of life while idle, and between counters while busy.
HEARTBEAT = 0.5


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The executor is loaded."""

    stats: ExecutorStats
    max_request_tokens: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The executor could not be loaded, or has failed; the process ends after this."""

    reason: str
    error_class: str = ""
    """Name of the ``pelton.errors`` class, when it is one."""


class Step(msgspec.Struct, frozen=True, tag=True):
    """Updates of one step and, now and then, counters; empty: a sign of life."""

    updates: list[RequestUpdate]
    stats: ExecutorStats | None = None


Event = Ready | Failed | Step | WeightsUpdated


def _leave_with_parent() -> None:
    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="pelton-parent-watch", daemon=True).start()


class _Channel:
    """The socket as ``run_loop`` wants it."""

    def __init__(self, address: str) -> None:
        import zmq

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        # The default high-water mark is the back-pressure: an API process that does not read stalls
        # the executor instead of filling memory.
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(address)
        self._again = zmq.Again
        self._noblock = zmq.NOBLOCK
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
        self._last_stats = 0.0
        self.executor: Executor | None = None

    def send(self, event: Event) -> None:
        self._socket.send(self._encoder.encode(event))

    def receive(self, wait: bool) -> Iterable[Command]:
        if wait:
            self._socket.poll(int(HEARTBEAT * 1000))
        while True:
            try:
                yield self._decoder.decode(self._socket.recv(self._noblock))
            except self._again:
                return

    def send_updates(self, updates: list[RequestUpdate]) -> None:
        assert self.executor is not None
        now = time.monotonic()
        if now - self._last_stats > HEARTBEAT or not self.executor.has_work:
            self._last_stats = now
            self.send(Step(updates, self.executor.stats()))
        elif updates:
            self.send(Step(updates))

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def main(address: str, spec_json: str) -> int:
    """Load, tell, loop; the exit code is 0 after ``Stop``."""
    _leave_with_parent()
    channel = _Channel(address)
    try:
        executor = msgspec.json.decode(spec_json, type=ExecutorSpec).open()
        channel.executor = executor
        channel.send(Ready(executor.stats(), executor.max_request_tokens))
        try:
            run_loop(executor, channel.receive, channel.send_updates, channel.send)
        finally:
            close_executor(executor)
    except BaseException as error:  # told to the parent, whatever it is
        name = type(error).__name__
        if isinstance(error, PeltonError):
            channel.send(Failed(str(error), name))
        else:
            import traceback

            traceback.print_exc()
            channel.send(Failed(f"{name}: {error}"))
        return 1
    finally:
        channel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
