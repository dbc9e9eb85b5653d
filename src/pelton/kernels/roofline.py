"""What this machine itself can do: read bandwidth and arithmetic rates, measured in a fraction of a second.

The ceilings that profiles are compared with. All threads of a team read a buffer larger than the caches,
or multiply and add in registers with the instructions that the linear kernels use (``csrc/measure.inl``).
Needs the native library.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from pelton.kernels.native import Array, Attr, Team, aligned_empty

_READ_BYTES = 1 << 28
_TARGET_SECONDS = 0.03
_REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class MachineRates:
    """Best of several short runs with ``threads`` threads."""

    threads: int
    read: float
    """Bytes per second read from memory."""
    float32: float
    """Float32 operations per second; a multiply-add is two."""
    int8: float
    """The same of int8 products accumulated in int32."""


def measure(threads: int) -> MachineRates:
    """The machine's rates with ``threads`` threads; takes about half a second.

    Raises ``MissingDependencyError`` without the native library.
    """
    done = np.zeros((threads, 2), np.float32)
    data = aligned_empty(_READ_BYTES)
    data.fill(1)
    with Team(threads) as team:

        def best(kernel: str, inputs: list[Array], attrs: list[Attr]) -> float:
            run = team.repeat(kernel, inputs, [done], attrs)
            seconds = []
            for _ in range(_REPEATS):
                start = time.perf_counter()
                run(1)
                seconds.append(time.perf_counter() - start)
            return min(seconds)

        def rate(kernel: str) -> float:
            rounds = 1 << 12
            while (took := best(kernel, [], [rounds])) < _TARGET_SECONDS / 2:
                rounds = max(rounds * 2, int(rounds * _TARGET_SECONDS / max(took, 1e-6)))
            return float(done[:, 0].sum()) * 1e6 / took

        return MachineRates(
            threads=threads,
            read=_READ_BYTES / best("cpu.measure.read", [data], []),
            float32=rate("cpu.measure.f32"),
            int8=rate("cpu.measure.int8"),
        )
