"""What requests see of a GPU engine: an executor in this process, one step ahead of the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np

import pelton
from pelton.runtime.config import ExecutorConfig
from pelton.runtime.executor import Executor
from pelton.runtime.host_time import HostTime
from pelton.runtime.validation import resolve_requests


def start(
    session: pelton.Session,
    prompts: Sequence[int],
    answer: int,
    *,
    caches: bool = False,
    **sampling: float | bool,
) -> Executor:
    """An executor with requests of random prompts of the given lengths, each answered to its full length.

    ``caches``: whether prefixes are cached, as a server does."""
    config = ExecutorConfig(max_waiting=len(prompts), enable_prefix_caching=caches)
    executor, rng = Executor(session, config), np.random.default_rng(2)
    params = pelton.SamplingParams(max_tokens=answer, ignore_eos=True, **{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
    for i, length in enumerate(prompts):
        ids = rng.integers(3, 100000, length).tolist()
        for request in resolve_requests(ids, params, session.config, None, str(i), 0):
            executor.add(request)
    return executor


def answer_tokens(session: pelton.Session, prompt: int, answer: int) -> float:
    """Milliseconds per token of one greedy answer, from its first token to its last."""
    executor = start(session, [prompt], answer + 1)
    times = []
    while executor.has_work:
        if executor.step():
            times.append(time.perf_counter())
    return 1e3 * (times[-1] - times[0]) / answer


def decode_step(
    session: pelton.Session, prompts: Sequence[int], steps: int, **sampling: float | bool
) -> tuple[float, HostTime]:
    """Median milliseconds of steps in which all of ``prompts`` decode, the first few left out; and the
    host's part of them."""
    executor = start(session, prompts, 64 + steps + len(prompts), **sampling)
    warm = 0
    while warm < 8:  # a step in flight is not this one
        warm = warm + 1 if len(executor.step()) == len(prompts) else 0
    times = []
    executor.restart_host_time()
    for _ in range(steps):
        begin = time.perf_counter()
        executor.step()
        times.append(1e3 * (time.perf_counter() - begin))
    host = executor.stats().host_time
    assert host is not None
    executor.close()
    return statistics.median(times), host
