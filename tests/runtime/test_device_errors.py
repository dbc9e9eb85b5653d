"""A GPU that fails in a step: nothing is retried on it, and closing says nothing more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pelton.engine.batch import InputBatch
from pelton.engine.batch_sampling import SamplingInputs
from pelton.errors import DeviceError
from pelton.runtime.executor import Executor
from tests.runtime.fakes import FakePending, FakeSession, SubmittingSession
from tests.runtime.test_executor import drain, make_request


class Breaking(FakeSession):
    """Its device fails in the third step, and is gone after that."""

    def run(self, batch: InputBatch, outputs: Any = ()) -> Any:
        if self.num_runs >= 2:
            self.num_runs += 1
            raise DeviceError("the GPU failed")
        return super().run(batch, outputs)


class BreakingAhead(SubmittingSession):
    """The same, heard of when tokens are taken: later than the step was submitted."""

    def submit(self, batch: InputBatch, sampling: SamplingInputs) -> FakePending:
        if self.num_runs >= 2:
            self.num_runs += 1
            return _Broken(self, np.zeros(len(sampling.temperature_N), np.int32))
        return super().submit(batch, sampling)


class _Broken(FakePending):
    def tokens(self) -> np.ndarray[Any, Any]:
        raise DeviceError("the GPU failed")


@pytest.mark.parametrize("kind", [Breaking, BreakingAhead])
def test_a_device_error_leaves_the_executor_and_closing_is_quiet(kind: type[FakeSession]) -> None:
    session = kind()
    executor = Executor(session)
    for i in range(3):
        executor.add(make_request(str(i), [1, 2, 3 + i]))
    with pytest.raises(DeviceError, match="the GPU failed"):
        drain(executor)
    assert session.num_runs <= 4, "a step was tried again on a device that failed"
    executor.close()
    assert [pool.num_used for pool in executor.kv.pools] == [0]
