"""Weights on the GPU: from the mapped shards through pinned memory, by several threads at once.

One thread copies out of the page cache at a third of what the GPU's bus takes.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from pelton.engine.resources import cores
from pelton.engine.shards import ALIGNMENT, Shards, align
from pelton.kernels.gpu.driver import Device, Event, Memory, PinnedMemory, Stream

#: Bytes of one pinned buffer; each thread has two that take turns.
_STAGE = 16 << 20
_THREADS = 6


class DeviceWeights:
    """Every named blob of ``shards`` in one piece of memory of ``device``; ``addresses`` by name."""

    def __init__(self, shards: Shards, names: Iterable[str], device: Device) -> None:
        self._device = device
        names = list(dict.fromkeys(names))
        offsets, total = {}, 0
        for name in names:
            offsets[name] = total
            total += align(shards.meta[name].nbytes)
        self.memory = Memory(total + ALIGNMENT)
        self.addresses = {name: self.memory.address + offset for name, offset in offsets.items()}
        self.load(shards)

    def load(self, shards: Shards) -> None:
        """Copy the blobs of ``shards`` to their places."""
        parts = [(name, start) for name in self.addresses for start in range(0, shards[name].size, _STAGE)]
        threads = max(1, min(_THREADS, cores() - 1, len(parts)))
        lanes = [_Lane() for _ in range(threads)]
        try:
            with ThreadPoolExecutor(threads) as pool:
                # Neighbouring parts go to different threads: they read the file together, from front to back.
                for _ in pool.map(lambda i: self._copy(shards, parts[i::threads], lanes[i]), range(threads)):
                    pass
        finally:
            for lane in lanes:
                lane.close()

    def _copy(self, shards: Shards, parts: list[tuple[str, int]], lane: _Lane) -> None:
        self._device.make_current()
        for (name, start), (stage, free) in zip(parts, itertools.cycle(lane.stages)):
            part = shards[name][start : start + _STAGE]
            free.wait()  # an event that was never recorded is over
            ctypes.memmove(stage.address, part.ctypes.data, part.size)
            lane.stream.copy_in(self.addresses[name] + start, stage.address, part.size)
            free.record(lane.stream)
        lane.stream.wait()

    def close(self) -> None:
        self.memory.close()


class _Lane:
    """What a thread copies through."""

    def __init__(self) -> None:
        self.stream = Stream()
        self.stages = [(PinnedMemory(_STAGE), Event()) for _ in range(2)]

    def close(self) -> None:
        for stage, free in self.stages:
            free.close()
            stage.close()
        self.stream.close()
