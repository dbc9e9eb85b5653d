"""A recorded trace, replayed on a session without a model, gives the same decisions."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pelton.runtime.config import ExecutorConfig
from pelton.runtime.executor import Executor
from pelton.runtime.scheduled import SchedulerOutput
from pelton.runtime.trace import Aborted, Added, Event, Recomputed, Stepped, TraceWriter, read_trace
from tests.runtime.fakes import FakeSession, fake_config
from tests.runtime.test_executor import make_request

TRACES = Path(__file__).parent / "traces"
CONFIG = fake_config(windows=(0, 6), max_batch_size=4, max_num_tokens=12, max_seq_len=48)
NUM_BLOCKS = 16


def record(path: Path) -> None:
    """A short service with shared prefixes, priorities, preemption and an abort. Wrote traces/mixed.jsonl."""
    stream = io.StringIO()
    executor = Executor(FakeSession(CONFIG, NUM_BLOCKS), trace=TraceWriter(stream))
    rng = np.random.default_rng(1)
    for i in range(24):
        prompt = [*range(int(rng.integers(0, 20))), *rng.integers(0, 50, rng.integers(1, 9)).tolist()]
        executor.add(
            make_request(
                f"r{i}",
                prompt,
                priority=int(rng.integers(0, 3)),
                seed=i,
                temperature=float(i % 2),
                max_tokens=int(rng.integers(1, 20)),
                stop_token_ids=(1, 2, 3),
            )
        )
        for _ in range(int(rng.integers(0, 4))):
            executor.step()
        if i == 15:
            executor.abort("r14")
    while executor.has_work:
        executor.step()
    path.write_text(stream.getvalue(), encoding="utf-8")


class Replayer(TraceWriter):
    """Feeds a trace to an executor whose fake logits are made to choose the recorded tokens."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__(io.StringIO())
        self._events = events
        self._outputs: list[SchedulerOutput] = []
        self.session = FakeSession(CONFIG, NUM_BLOCKS, edit_logits=self._choose)
        self.executor = Executor(self.session, ExecutorConfig(), trace=self)
        schedule = self.executor.scheduler.schedule

        def noting() -> SchedulerOutput:
            self._outputs.append(schedule())
            return self._outputs[-1]

        self.executor.scheduler.schedule = noting  # type: ignore[method-assign]

    def _choose(self, batch: object, logits: np.ndarray[Any, Any]) -> None:
        sampling = [s.sequence.request_id for s in self._outputs[-1].scheduled if s.samples]
        for row, request_id in zip(logits, sampling, strict=True):
            assert isinstance(self._now, Stepped)
            row[self._now.tokens[request_id]] = 100.0

    def run(self) -> list[Stepped]:
        """The replay's own steps."""
        steps = []
        for event in self._events:
            self._now = event
            if isinstance(event, Added):
                greedy = msgspec.structs.replace(event.request.sampling, temperature=0.0)
                self.executor.add(msgspec.structs.replace(event.request, sampling=greedy))
            elif isinstance(event, Aborted):
                self.executor.abort(event.request_id)
            elif isinstance(event, Recomputed):
                self.executor.recompute_all()
            else:
                self._stream.truncate(0)
                self._stream.seek(0)
                self.executor.step()
                steps.append(msgspec.json.decode(self._stream.getvalue(), type=Stepped))
        return steps


def test_the_recorded_trace_is_scheduled_as_it_was() -> None:
    """When a change of the algorithm is meant to change this, write the file anew with ``record``."""
    events = read_trace(TRACES / "mixed.jsonl")
    replayer = Replayer(events)
    assert replayer.run() == [event for event in events if isinstance(event, Stepped)]
    assert not replayer.executor.has_work
    assert [pool.num_used for pool in replayer.executor.kv.pools] == [0, 0]


def test_the_recorded_trace_shows_what_it_is_for() -> None:
    steps = [event for event in read_trace(TRACES / "mixed.jsonl") if isinstance(event, Stepped)]
    assert any(step.preempted for step in steps)
    assert any(start > 0 and new > 1 for step in steps for _, start, new in step.scheduled), "chunks or hits"
    assert {reason for step in steps for reason in step.finished.values()} == {"stop", "length"}


@pytest.mark.parametrize("where", ["preempted", "scheduled"])
def test_a_different_decision_is_noticed(where: str) -> None:
    events = read_trace(TRACES / "mixed.jsonl")
    at = next(i for i, e in enumerate(events) if isinstance(e, Stepped) and getattr(e, where))
    event = events[at]
    assert isinstance(event, Stepped)
    events[at] = msgspec.structs.replace(event, **{where: ()})
    assert Replayer(events).run() != [e for e in events if isinstance(e, Stepped)]


def test_recording_twice_gives_the_same_file(tmp_path: Path) -> None:
    record(tmp_path / "trace.jsonl")
    assert (tmp_path / "trace.jsonl").read_text() == (TRACES / "mixed.jsonl").read_text()
