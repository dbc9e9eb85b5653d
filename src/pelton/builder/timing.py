"""Checks tactics against their op's reference, and times them, on this machine.

A tactic runs as a plan of the native runner that holds nothing but the call, once for each of many
copies of its weights and KV caches (``timing_bench``): together they are as large as what a real step
reads between two uses of one weight, at most three times the last-level cache, so weights come from memory
where they would in the model. Where a call computes for long, fewer copies do. Intermediate tensors
stay warm, as they are there. Candidates take turns, round by round, so that a disturbance of the
machine hits all of them. A time is the lower quartile of means over a dozen calls: being disturbed
only ever makes calls slower.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from pelton.builder.signature import Signature
from pelton.builder.timing_bench import Bench
from pelton.builder.timing_inputs import sample_of
from pelton.dtypes import ITEMSIZE
from pelton.ir.op import get_op
from pelton.kernels import native
from pelton.kernels.conformance import Case, ConformanceError, check, levels_of
from pelton.kernels.tactic import Tactic

#: Bytes of all copies together.
MIN_WORKING_SET, MAX_WORKING_SET = 32 << 20, 192 << 20
#: A weight beyond this is timed on part of its rows, and the time scaled.
MAX_WEIGHT = 48 << 20
ROUNDS = 5
#: While the median is more than so many times the lower quartile, the machine is busy with other things:
#: measure again, so many times in all.
CALM, TRIES = 1.2, 4
#: Seconds that one round of the fastest candidate should take.
ROUND_SECONDS = 0.006
#: Seconds after which a call is not run again.
CALL_SECONDS = 2.0
#: A candidate this many times slower than the fastest in a first try is not tried again.
HOPELESS = 4.0
#: Weight rows that a check computes.
CHECK_ROWS = 96


class Timer(Protocol):
    """Judges and times the tactics of a call."""

    def check(self, signature: Signature, tactic: Tactic) -> str | None:
        """Why the tactic's results are wrong; None: they are right."""
        ...

    def time(self, signature: Signature, tactics: Sequence[Tactic]) -> dict[str, float]:
        """Microseconds of one call, by tactic."""
        ...


class NativeTimer:
    """Times native tactics on this machine with ``threads`` threads."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._limit = min(max(3 * last_level_cache(), MIN_WORKING_SET), MAX_WORKING_SET)

    def check(self, signature: Signature, tactic: Tactic) -> str | None:
        """On generated operands of the call's own shapes, but at most so many tokens and weight rows."""
        rows = CHECK_ROWS + signature.weight_rows % 16
        level = levels_of(tactic)[-1]
        op = get_op(signature.op)
        sample = sample_of(op, (signature.small or signature).with_weight_rows(rows))
        with native.Team(self._threads) as team, torch.no_grad():
            try:
                check(Case(op, sample, tactic, level), team)
            except ConformanceError as error:
                return str(error)
        return None

    def time(self, signature: Signature, tactics: Sequence[Tactic]) -> dict[str, float]:
        """In rounds in which all candidates take turns."""
        part, scale = _part(signature)
        layouts = {tuple(sorted(t.weight_layouts.items())) for t in tactics}
        bench = Bench(part, self._threads, min(part.reuse_bytes, self._limit) // len(layouts))
        try:
            first = {t.name: _first_try(bench, t) for t in tactics}
            fastest = min(first.values())
            alive = [t for t in tactics if first[t.name] <= HOPELESS * fastest]
            samples = {name: [seconds] for name, seconds in first.items()} | self._rounds(
                bench, alive, fastest
            )
        finally:
            bench.close()
        # Rounded before anything is decided, so that a time read from a file decides the same.
        return {name: round(_quartile(s) * scale * 1e6, 2) for name, s in samples.items()}

    def _rounds(self, bench: Bench, tactics: Sequence[Tactic], fastest: float) -> dict[str, list[float]]:
        """Times of a call, by tactic."""
        calls = max(1, round(ROUND_SECONDS / fastest))
        for tactic in tactics:
            bench.seconds(tactic, calls)
        samples: dict[str, list[float]] = {t.name: [] for t in tactics}
        deadline = time.perf_counter() + CALL_SECONDS
        for _ in range(TRIES):
            for _ in range(ROUNDS):
                if time.perf_counter() > deadline and all(samples.values()):
                    return samples
                for tactic in tactics:
                    samples[tactic.name] += bench.seconds(tactic, calls)
            if all(_calm(s) for s in samples.values()):
                break
        return samples


def _first_try(bench: Bench, tactic: Tactic) -> float:
    """Shortest of a few calls: the very first one touches everything. Fewer where a call takes long."""
    seconds = bench.seconds(tactic, 1)
    while len(seconds) < 4 and sum(seconds) < CALL_SECONDS / 4:
        seconds += bench.seconds(tactic, 1)
    return min(seconds)


def _quartile(samples: Sequence[float]) -> float:
    return sorted(samples)[len(samples) // 4]


def _calm(samples: Sequence[float]) -> bool:
    """Whether most calls took about as long as the undisturbed ones."""
    return statistics.median(samples) <= CALM * _quartile(samples)


def _part(signature: Signature) -> tuple[Signature, float]:
    """The call on as many weight rows as ``MAX_WEIGHT`` bytes hold, and the factor to the whole."""
    rows = signature.weight_rows
    if not rows:
        return signature, 1.0
    row_bytes = max(
        o.shape[-1] * ITEMSIZE.get(o.dtype, 1)
        for o in signature.inputs
        if o is not None and o.kind == "weight" and o.shape[0] == rows
    )
    part = signature.with_weight_rows(max(256, MAX_WEIGHT // row_bytes // 256 * 256))
    return part, rows / part.weight_rows


def last_level_cache() -> int:
    """Bytes of the largest cache that the first core uses; 0 where the system does not say."""
    sizes = [0]
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = index.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 0)
        sizes.append(int(text[:-1]) * unit if unit else int(text or 0))
    return max(sizes)
