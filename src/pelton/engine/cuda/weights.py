"""Weights on the GPU: from the mapped shards through pinned memory, copies overlapping reads."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from pelton.engine.shards import ALIGNMENT, Shards, align
from pelton.kernels.gpu.driver import Event, Memory, PinnedMemory, Stream

#: Bytes of one pinned buffer; two take turns.
_STAGE = 64 << 20


class DeviceWeights:
    """Every named blob of ``shards`` in one piece of device memory; ``addresses`` by name."""

    def __init__(self, shards: Shards, names: Iterable[str]) -> None:
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
        stream = Stream()
        stages = [(PinnedMemory(_STAGE), Event()) for _ in range(2)]
        try:
            turn = 0
            for name in self.addresses:
                blob = shards[name]
                for start in range(0, blob.size, _STAGE):
                    part = blob[start : start + _STAGE]
                    stage, free = stages[turn % 2]
                    if turn >= 2:
                        free.wait()
                    ctypes.memmove(stage.address, part.ctypes.data, part.size)
                    stream.copy_in(self.addresses[name] + start, stage.address, part.size)
                    free.record(stream)
                    turn += 1
            stream.wait()
        finally:
            for stage, free in stages:
                free.close()
                stage.close()
            stream.close()

    def close(self) -> None:
        self.memory.close()
