"""The loop around an executor, shared by the thread and the process client.

    take the commands that came in, new weights among them; if there is work, run one step and send its
    updates; otherwise wait for a command.

It ends on ``Stop``, or by raising what a step raised: a device-fatal error (the executor itself ends
single requests that fail)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from pelton.engine.artifact import open_engine
from pelton.errors import EngineError, PeltonError
from pelton.runtime.executor import Executor
from pelton.runtime.request import Request, RequestUpdate


class Add(msgspec.Struct, frozen=True, tag=True):
    """Queue a request."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request."""

    request_id: str


class UpdateWeights(msgspec.Struct, frozen=True, tag=True):
    """Run the weights of another engine of the same plan from now on; answered by ``WeightsUpdated``."""

    engine: str
    engine_id: str
    """Of the engine as it was verified: the directory may have changed since."""


class WeightsUpdated(msgspec.Struct, frozen=True, tag=True):
    """The weights have been replaced, or were refused (``error``) and are as they were."""

    weight_epoch: int
    error: str = ""
    error_class: str = ""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave the loop."""


Command = Add | Abort | UpdateWeights | Stop


def run_loop(
    executor: Executor,
    receive: Callable[[bool], Iterable[Command]],
    send: Callable[[list[RequestUpdate]], None],
    answer: Callable[[WeightsUpdated], None],
) -> None:
    """Drive ``executor`` until ``Stop``.

    ``receive(wait)`` returns the commands at hand; with ``wait`` it may block until there is one
    (or return nothing after a while). ``send`` takes the updates of one step, possibly none; ``answer``
    what became of an ``UpdateWeights``."""
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
                case UpdateWeights():
                    answer(_update_weights(executor, command))
                case Stop():
                    return
        if executor.has_work:
            updates.extend(executor.step())
        send(updates)


def _update_weights(executor: Executor, command: UpdateWeights) -> WeightsUpdated:
    """Between two steps. An error that is no refusal is raised: then nobody knows what is loaded."""
    try:
        engine = open_engine(command.engine)
        if engine.engine_id != command.engine_id:
            raise EngineError(f"{engine.path} was changed while it was being loaded; try again")
        executor.update_weights(engine)
    except PeltonError as error:
        epoch = executor.stats().weight_epoch
        return WeightsUpdated(weight_epoch=epoch, error=str(error), error_class=type(error).__name__)
    return WeightsUpdated(weight_epoch=executor.stats().weight_epoch)
