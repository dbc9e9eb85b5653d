"""Names what a server still holds: its connections, how far the request on each is, and where tasks wait."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn


def held_by(server: uvicorn.Server) -> list[str]:
    """A line for each connection and each request of ``server``, then, if there are any, one for every other
    task of the event loop, which this is called on. Nothing when nothing is held."""
    requests = {id(_cycle(task)): _place(task) for task in server.server_state.tasks}
    lines = []
    for connection in server.server_state.connections:
        protocol: Any = connection
        cycle, transport = protocol.cycle, protocol.transport
        state = "no request yet"
        if cycle is not None:
            state = f"response {'complete' if cycle.response_complete else 'not complete'}"
            state += ", disconnected" if cycle.disconnected else ""
        state += ", reading paused" if protocol.flow.read_paused else ""
        state += ", closing" if transport.is_closing() else ""
        unsent = transport.get_write_buffer_size()
        lines.append(
            f"{protocol.client}: {state}, {unsent} bytes unsent; {requests.pop(id(cycle), 'no task')}"
        )
    lines += [f"a request without a connection; {place}" for place in requests.values()]
    if lines:
        lines += [_place(task) for task in asyncio.all_tasks() - server.server_state.tasks]
    return lines


def _cycle(task: asyncio.Task[Any]) -> Any:
    """The request and response that a task of uvicorn's is about."""
    coroutine: Any = task.get_coro()
    return coroutine.cr_frame and coroutine.cr_frame.f_locals["self"]


def _place(task: asyncio.Task[Any]) -> str:
    """The innermost coroutines of ``task`` that wait for each other, and their lines."""
    places = []
    coroutine: Any = task.get_coro()
    while coroutine is not None:
        kind = "ag" if hasattr(coroutine, "ag_frame") else "cr"
        frame = getattr(coroutine, f"{kind}_frame", None)
        if frame is not None:
            places.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        coroutine = getattr(coroutine, f"{kind}_await", None)
    return f"{task.get_name()} in {' > '.join(places[-4:])}"
