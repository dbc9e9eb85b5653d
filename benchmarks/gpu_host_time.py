"""The host's part of a GPU's decode steps, by the counter that ``pelton bench`` and ``/metrics`` show: all
that the executor's thread does in a step, without waiting for the GPU.

    python benchmarks/gpu_host_time.py                    # on this machine's GPU
    python benchmarks/gpu_host_time.py --null             # on a GPU that does nothing: needs none
    python benchmarks/gpu_host_time.py --null --parts     # where the time goes, by wall clock

The engine has as many layers and tokens as Llama-3.1-8B and narrow layers: how wide they are is nothing to
the host. ``--engine`` keeps it for the next run.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from gpu_serving import start
from random_llama import LLAMA_8B, RandomLlama

import pelton
from pelton.engine import validate
from pelton.engine.cuda import edits, inputs, runner, sampler
from pelton.kernels.gpu import driver
from pelton.kernels.gpu.null import null_gpu
from pelton.runtime import ahead, executor, input_batch, scheduler

NARROW = LLAMA_8B | {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
#: What requests ask for, and at how many sequences it is timed.
KINDS: dict[str, tuple[tuple[int, ...], dict[str, float]]] = {
    "greedy": ((1, 64, 256), {}),
    "cached": ((256,), {"caches": True}),
    "sampled": ((256,), {"temperature": 0.8, "top_p": 0.9}),
    "penalties": ((256,), {"temperature": 0.8, "repetition_penalty": 1.1}),
    "logprobs": ((256,), {"logprobs": 2}),
}
#: Parts of a step, outer ones before those within them.
PARTS: tuple[tuple[Any, str], ...] = (
    (scheduler.Scheduler, "schedule"),
    (ahead.Ahead, "submit"),
    (ahead, "sampling_inputs"),
    (ahead, "next_inputs"),
    (input_batch.InputBatchBuilder, "build"),
    (input_batch.InputBatchBuilder, "build_next"),
    (validate.BatchChecker, "check"),
    (runner.CudaRunner, "submit"),
    (inputs.DeviceInputs, "stage"),
    (sampler.DeviceSampler, "give"),
    (driver.Graph, "launch"),
    (sampler.DeviceSampler, "sample"),
    (edits.DeviceEdits, "before"),
    (edits.DeviceEdits, "after"),
    (driver.Event, "record"),
    (executor.Executor, "_take"),
    (ahead.Ahead, "collect"),
    (driver.Event, "wait"),
)


def build(path: Path) -> None:
    config = pelton.BuildConfig(
        target="sm_90", dtype="bfloat16", max_seq_len=8448, max_num_tokens=8192, max_batch_size=512
    )
    pelton.build(RandomLlama(NARROW, "bfloat16"), config, output=path, check=False)


def timed(function: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = function(*args, **kwargs)
        times.append(time.perf_counter() - begin)
        return result

    return call


class TimedLibrary:
    """libcuda, each of its functions timed."""

    def __init__(self, library: Any, times: dict[str, list[float]]) -> None:
        self._library, self._times = library, times

    def __getattr__(self, name: str) -> Any:
        function = timed(getattr(self._library, name), self._times[name])
        setattr(self, name, function)
        return function


@contextlib.contextmanager
def parts() -> Iterator[dict[str, list[float]]]:
    """Within, seconds of each call of ``PARTS`` and of the driver; timing them takes time too."""
    times: dict[str, list[float]] = defaultdict(list)
    library = TimedLibrary(driver.library(), times)

    def timed_library() -> TimedLibrary:
        return library

    with contextlib.ExitStack() as patches:
        for owner, name in PARTS:
            label = f"{owner.__name__.split('.')[-1]}.{name}"
            patches.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name), times[label])))
        patches.enter_context(mock.patch.object(driver, "library", timed_library))
        yield times


def measure(
    session: pelton.Session,
    sequences: int,
    steps: int,
    prompt: int,
    asks: dict[str, float],
    times: dict[str, list[float]],
) -> str:
    """Steps in which ``sequences`` decode, of which a sixteenth needs a block; ``times``: of these alone."""
    run = start(session, [prompt + i % 16 for i in range(sequences)], 80 + steps + sequences, **asks)
    warm = 0
    while warm < 8:  # a step in flight is not this one
        warm = warm + 1 if len(run.step()) == sequences else 0
    run.restart_host_time()
    for seconds in times.values():
        seconds.clear()
    whole = []
    for _ in range(steps):
        begin = time.perf_counter()
        run.step()
        whole.append(time.perf_counter() - begin)
    host = run.stats().host_time
    assert host is not None
    run.close()
    return (
        f"host {1e6 * host.median:6.0f} us, p99 {1e6 * host.p99:6.0f}, "
        f"step {1e6 * statistics.median(whole):6.0f}"
    )


def describe(name: str, seconds: list[float], steps: int) -> str:
    """A part's median time in us, and how often a step comes by it."""
    return f"{name} {1e6 * statistics.median(seconds):.1f} x{len(seconds) / steps:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--null", action="store_true", help="a GPU that does nothing")
    parser.add_argument("--engine", type=Path, help="where the engine is, or is to be built")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--parts", action="store_true", help="the parts of a step besides")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        path = args.engine or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "narrow.engine"
        if not path.exists():
            build(path)
        if args.null:
            stack.enter_context(null_gpu())
        session = stack.enter_context(pelton.Session(path, gpu_memory_fraction=0.2))
        for kind, (numbers, sampling) in KINDS.items():
            for sequences in numbers if args.only in (None, kind) else ():
                found = measure(session, sequences, args.steps, args.prompt, sampling, {})
                print(f"{kind:9} {sequences:3}: {found}", flush=True)
                if not args.parts:
                    continue
                with parts() as times:
                    found = measure(session, sequences, args.steps, args.prompt, sampling, times)
                print("  with parts:", found)
                print("   ", ", ".join(describe(n, t, args.steps) for n, t in times.items() if t), flush=True)


if __name__ == "__main__":
    main()
