"""Where each intermediate tensor lies in the arena.

Buffers that are never alive at the same time share bytes. Placing them is dynamic storage
allocation; largest first at the lowest free offset is simple and close to the lower bound (the
largest sum of sizes alive at once) on transformer graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pelton.engine.shards import align


@dataclass(frozen=True)
class Lifetime:
    """A buffer of ``nbytes``, alive from instruction ``first`` to ``last``, both included.

    Both ends count, so an output never shares bytes with an input of the instruction that makes it.
    """

    nbytes: int
    first: int
    last: int

    def overlaps(self, other: Lifetime) -> bool:
        return self.first <= other.last and other.first <= self.last


def plan_arena(buffers: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Offset of each buffer (64-byte aligned), and the size of the arena in bytes."""
    offsets = [0] * len(buffers)
    placed: list[int] = []
    total = 0
    for i in sorted(range(len(buffers)), key=lambda i: (-buffers[i].nbytes, buffers[i].first, i)):
        taken = sorted(
            (offsets[j], offsets[j] + align(buffers[j].nbytes))
            for j in placed
            if buffers[i].overlaps(buffers[j])
        )
        offset = 0
        for start, stop in taken:
            if offset + buffers[i].nbytes <= start:
                break
            offset = max(offset, stop)
        offsets[i] = offset
        placed.append(i)
        total = max(total, offset + align(buffers[i].nbytes))
    return offsets, total


def lower_bound(buffers: Sequence[Lifetime]) -> int:
    """Largest number of bytes alive at one instruction: no arena can be smaller."""
    moments = {b.first for b in buffers}
    return max((sum(align(b.nbytes) for b in buffers if b.first <= t <= b.last) for t in moments), default=0)
