"""Scheduler traces: what an executor was asked, what it scheduled and which tokens came, as JSON lines.

A trace is enough to replay a run on a session without a model and to get the same decisions, so that a
scheduling fault seen in service becomes a test. Prompts are part of it, so tracing is off by default.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

import msgspec

from pelton.runtime.request import Request, RequestUpdate
from pelton.runtime.scheduled import SchedulerOutput


class Added(msgspec.Struct, frozen=True, tag="add"):
    request: Request


class Aborted(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str


class Stepped(msgspec.Struct, frozen=True, tag="step"):
    """One step: (request id, tokens computed before, tokens computed) in order, who was preempted, and
    the token each sampling request got or "error"."""

    scheduled: tuple[tuple[str, int, int], ...]
    preempted: tuple[str, ...]
    tokens: dict[str, int]
    finished: dict[str, str]


class Recomputed(msgspec.Struct, frozen=True, tag="recompute"):
    """The weights changed: all KV was forgotten."""


Event = Added | Aborted | Stepped | Recomputed


class TraceWriter:
    """Appends events to a text stream; give it to ``Executor(..., trace=)``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def add(self, request: Request) -> None:
        self._write(Added(request))

    def abort(self, request_id: str) -> None:
        self._write(Aborted(request_id))

    def recompute(self) -> None:
        self._write(Recomputed())

    def step(self, output: SchedulerOutput, updates: Iterable[RequestUpdate]) -> None:
        self._write(stepped(output, list(updates)))

    def _write(self, event: Event) -> None:
        self._stream.write(msgspec.json.encode(event).decode() + "\n")


def stepped(output: SchedulerOutput, updates: Sequence[RequestUpdate]) -> Stepped:
    """The event of a step."""
    return Stepped(
        scheduled=tuple((s.sequence.request_id, s.num_computed, s.num_new) for s in output.scheduled),
        preempted=output.preempted,
        tokens={u.request_id: u.new_token_ids[0] for u in updates if u.new_token_ids},
        finished={u.request_id: u.finish_reason for u in updates if u.finish_reason is not None},
    )


def read_trace(path: Path | str) -> list[Event]:
    """All events of a file that a ``TraceWriter`` wrote."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [msgspec.json.decode(line, type=Event) for line in lines]
