"""Ten thousand steps of random traffic give back all they took."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest

from pelton.engine.session import Session
from pelton.runtime.config import ExecutorConfig
from pelton.runtime.executor import Executor
from pelton.runtime.request import SamplingParams
from pelton.runtime.validation import resolve_requests
from tests.gpu.conftest import Compiling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="others use the GPU at the same time"),
]
STEPS = 10_000
#: Steps after which everything that is loaded or captured on first use is there.
WARM = 2_000
#: Memory that may come and go: an allocator's pages, garbage not collected yet.
SLACK = 8 << 20


def host_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_ten_thousand_steps_leak_nothing(engine: tuple[Path, str], compiling: Compiling) -> None:
    compiling.wait()  # its memory is this process's too
    path, dtype = engine
    if dtype != "bfloat16":
        pytest.skip("once is enough")
    rng = np.random.default_rng(9)
    with Session(path, kv_blocks=600) as session:
        device = session._device
        assert device is not None
        executor = Executor(session, ExecutorConfig())
        free, resident, count = [], [], 0
        for step in range(1, STEPS + 1):
            while len(executor._sequences) < 30:
                ids = rng.integers(0, 500, int(rng.integers(1, 200))).tolist()
                params = SamplingParams(
                    temperature=float(rng.integers(2)),
                    max_tokens=int(rng.integers(1, 40)),
                    # Some need their logits on the host, and make the steps they are in wait.
                    repetition_penalty=1.1 if rng.random() < 0.02 else 1.0,
                    ignore_eos=True,
                )
                for request in resolve_requests(ids, params, session.config, None, str(count), 0):
                    executor.add(request)
                count += 1
                if rng.random() < 0.1:
                    executor.abort(str(int(rng.integers(count))))
            executor.step()
            if step % 1000 == 0 and step >= WARM:
                free.append(device.memory()[0])
                resident.append(host_bytes())
        executor.close()
        assert [pool.num_used for pool in executor.kv.pools] == [0] * len(executor.kv.pools)
    # Others may use the GPU for a while; a leak of ours shows in every thousand steps.
    assert np.median(np.diff(free)) > -SLACK / len(free), free
    assert resident[-1] <= resident[0] + SLACK, resident


def test_sessions_give_their_memory_back(engine: tuple[Path, str], compiling: Compiling) -> None:
    compiling.wait()
    path, dtype = engine
    if dtype != "bfloat16":
        pytest.skip("once is enough")
    free = []
    for _ in range(6):
        with Session(path, kv_blocks=600) as session:
            device = session._device
            executor = Executor(session, ExecutorConfig())
            for request in resolve_requests(
                [1, 2, 3], SamplingParams(max_tokens=3), session.config, None, "0", 0
            ):
                executor.add(request)
            while executor.has_work:
                executor.step()
            executor.close()
        assert device is not None
        free.append(device.memory()[0])
    assert np.median(np.diff(free[1:])) > -(1 << 20), free
