"""The counter of host time: what is waited for is not the host's."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from pelton.runtime.executor import Executor
from pelton.runtime.host_time import HostClock
from tests.runtime.fakes import FakeSession, SubmittingSession
from tests.runtime.test_executor import drain, make_request


def test_waiting_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = HostClock()
    assert clock.last is None
    for busy, waits in ((2.0, 5.0), (4.0, 1.0), (3.0, 7.0)):
        with clock.step():
            now += busy / 2
            with clock.waiting():
                now += waits
            now += busy / 2
    assert clock.last is not None
    assert clock.last.median == pytest.approx(3.0)
    assert 3.9 < clock.last.p99 <= 4.0


@pytest.mark.parametrize("session", [FakeSession, SubmittingSession])
def test_the_device_s_time_is_waited_for(session: type[FakeSession], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the host or the device samples: a minute on the device adds nothing to the counter."""
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    def slow(*_: object) -> None:
        nonlocal now
        now += 60.0

    device = session(before_run=slow) if session is FakeSession else session()
    if isinstance(device, SubmittingSession):
        submit = device.submit

        def submitted(batch: object, sampling: object) -> object:
            pending = submit(batch, sampling)  # type: ignore[arg-type]
            tokens: Callable[[], object] = pending.tokens

            def taken() -> object:
                slow()
                return tokens()

            monkeypatch.setattr(pending, "tokens", taken)
            return pending

        monkeypatch.setattr(device, "submit", submitted)
    executor = Executor(device)
    assert executor.stats().host_time is None
    executor.add(make_request("a", [1, 2, 3]))
    executor._counters._dear_due = 0.0
    drain(executor)
    measured = executor.stats().host_time
    assert now > 0
    assert measured is not None
    assert measured.p99 == 0.0
