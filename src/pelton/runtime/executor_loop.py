"""The loop around an executor, shared by the thread and the process client.

    take the commands that came in; if there is work, run one step and send its updates;
    otherwise wait for a command.

It ends on ``Stop``, or by raising what a step raised: a device-fatal error (the executor itself ends
single requests that fail)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from pelton.errors import PeltonError
from pelton.runtime.executor import Executor
from pelton.runtime.request import Request, RequestUpdate


class Add(msgspec.Struct, frozen=True, tag=True):
    """Queue a request."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request."""

    request_id: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave the loop."""


Command = Add | Abort | Stop


def run_loop(
    executor: Executor,
    receive: Callable[[bool], Iterable[Command]],
    send: Callable[[list[RequestUpdate]], None],
) -> None:
    """Drive ``executor`` until ``Stop``.

    ``receive(wait)`` returns the commands at hand; with ``wait`` it may block until there is one
    (or return nothing after a while). ``send`` takes the updates of one step, possibly none."""
    while True:
        updates: list[RequestUpdate] = []
        for command in receive(not executor.has_work):
            match command:
                case Add(request):
                    try:
                        executor.add(request)
                    except PeltonError as error:
                        updates.append(
                            RequestUpdate(
                                request_id=request.request_id, finish_reason="error", error=str(error)
                            )
                        )
                case Abort(request_id):
                    executor.abort(request_id)
                case Stop():
                    return
        if executor.has_work:
            updates.extend(executor.step())
        send(updates)
