"""KVCacheManager: which blocks each sequence holds, in every KV group.

Each group (layers of equal head count, size and window) has its own ``BlockPool`` and its own block
table per sequence. A sliding-window group gives a block back as soon as it lies wholly outside the
window of every token still to come; its table entry is then 0 and is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pelton.engine.config import KVGroup
from pelton.runtime.block_pool import BlockPool

Int32 = npt.NDArray[np.int32]


class BlockTable:
    """One sequence's blocks in one group: logical blocks ``start`` .. ``stop`` - 1 are held."""

    __slots__ = ("blocks", "start", "stop")

    def __init__(self, num_columns: int) -> None:
        self.blocks: Int32 = np.zeros(num_columns, np.int32)
        self.start = 0
        self.stop = 0

    def held(self) -> list[int]:
        ids: list[int] = self.blocks[self.start : self.stop].tolist()
        return ids


class SequenceKV:
    """A sequence's place in the KV cache: one table per group, and how far its blocks are indexed."""

    __slots__ = ("num_indexed_blocks", "tables")

    def __init__(self, num_groups: int, num_columns: int) -> None:
        self.tables = tuple(BlockTable(num_columns) for _ in range(num_groups))
        self.num_indexed_blocks = 0
        """Leading blocks already offered to the prefix cache."""


@dataclass(frozen=True)
class PrefixHit:
    """A cached prefix: ``num_tokens`` (whole blocks) and, per group, (first logical block, blocks)."""

    num_tokens: int
    blocks: tuple[tuple[int, tuple[int, ...]], ...]


class KVCacheManager:
    """Allocation is atomic: a sequence gets the blocks it needs in all groups, or none."""

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: Sequence[int],
        *,
        block_size: int,
        max_seq_len: int,
        poison: Callable[[int, Sequence[int]], None] | None = None,
    ) -> None:
        assert len(groups) == len(num_blocks)
        self.block_size = block_size
        self.windows = tuple(group.window for group in groups)
        self.slides = any(self.windows)
        self.num_columns = -(-max_seq_len // block_size)
        self.pools = tuple(
            BlockPool(n, (lambda blocks, g=g: poison(g, blocks)) if poison else None)  # type: ignore[misc]
            for g, n in enumerate(num_blocks)
        )

        self.no_hit = PrefixHit(0, ((0, ()),) * len(self.pools))

    def new_sequence(self) -> SequenceKV:
        return SequenceKV(len(self.pools), self.num_columns)

    def _first_needed(self, window: int, position: int) -> int:
        """The first logical block that a query at ``position`` sees."""
        return max(0, position - window + 1) // self.block_size if window else 0

    def _most_held(self, window: int) -> int:
        """The most blocks that ``window`` consecutive tokens touch."""
        return (window - 2) // self.block_size + 2

    def max_tokens(self) -> int:
        """The longest sequence that fits when it has the cache to itself."""
        limit = self.num_columns * self.block_size
        for pool, window in zip(self.pools, self.windows, strict=True):
            if not window or pool.num_blocks < self._most_held(window):
                limit = min(limit, pool.num_blocks * self.block_size)
        return limit

    def find_prefix(self, keys: Sequence[bytes], num_tokens: int) -> PrefixHit:
        """The longest usable cached prefix of a sequence of ``num_tokens`` tokens whose full blocks
        have ``keys``.

        A hit of L tokens needs every block of L in full groups, and in window groups the blocks that
        the next computed token sees. That token is at L, or at L - 1 on a full hit, whose last token
        is computed again for its logits.
        """
        num_full = min(len(keys), num_tokens // self.block_size)
        found: list[list[int | None]] = []
        for pool, window in zip(self.pools, self.windows, strict=True):
            ids: list[int | None] = []
            for key in keys[:num_full]:
                block = pool.find(key)
                if block is None and not window:
                    break
                ids.append(block)
            found.append(ids)
            num_full = min(num_full, len(ids))
        best = self._longest_common(found, num_full, num_tokens)
        position = min(best * self.block_size, num_tokens - 1)
        blocks = []
        for ids, window in zip(found, self.windows, strict=True):
            first = min(self._first_needed(window, position), best)
            blocks.append((first, tuple(b for b in ids[first:best] if b is not None)))
        return PrefixHit(best * self.block_size, tuple(blocks))

    def _longest_common(self, found: list[list[int | None]], num_full: int, num_tokens: int) -> int:
        """The largest k such that every window group has the blocks a hit of k blocks needs."""
        # run[g][k]: how many consecutive blocks ending with block k - 1 group g has.
        runs = []
        for ids in found:
            run = [0]
            for block in ids[:num_full]:
                run.append(0 if block is None else run[-1] + 1)
            runs.append(run)
        for k in range(num_full, 0, -1):
            position = min(k * self.block_size, num_tokens - 1)
            if all(
                run[k] >= k - self._first_needed(window, position)
                for run, window in zip(runs, self.windows, strict=True)
            ):
                return k
        return 0

    def fits(self, hit: PrefixHit, num_tokens: int) -> bool:
        """Whether a new sequence of ``num_tokens`` tokens, starting from ``hit``, could be computed to
        its end with the blocks that are free now."""
        for pool, window, (first, ids) in zip(self.pools, self.windows, hit.blocks, strict=True):
            held = -(-num_tokens // self.block_size) - first
            if window:
                held = min(held, self._most_held(window))
            if max(0, held - len(ids)) + pool.count_free(ids) > pool.num_free:
                return False
        return True

    def adopt(self, sequence: SequenceKV, hit: PrefixHit) -> None:
        """Give an empty sequence the blocks of a hit found just now."""
        for pool, table, (first, ids) in zip(self.pools, sequence.tables, hit.blocks, strict=True):
            assert table.start == table.stop == 0
            pool.acquire(ids)
            table.start, table.stop = first, first + len(ids)
            table.blocks[first : table.stop] = ids
        sequence.num_indexed_blocks = hit.num_tokens // self.block_size

    def allocate(self, sequence: SequenceKV, num_tokens: int) -> bool:
        """Make room for the first ``num_tokens`` tokens; False (and nothing changed) when any group
        lacks blocks."""
        stop = -(-num_tokens // self.block_size)
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            if stop - table.stop > pool.num_free:
                return False
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            if stop == table.stop + 1:  # as a rule, and much cheaper than a slice
                table.blocks[table.stop] = pool.allocate(1)[0]
                table.stop = stop
            elif stop > table.stop:
                table.blocks[table.stop : stop] = pool.allocate(stop - table.stop)
                table.stop = stop
        return True

    def allocate_one_each(self, sequences: Sequence[SequenceKV]) -> None:
        """One block more for each of ``sequences``; the caller has checked that there are as many."""
        for g, pool in enumerate(self.pools):
            for sequence, block in zip(sequences, pool.allocate(len(sequences)), strict=True):
                table = sequence.tables[g]
                table.blocks[table.stop] = block
                table.stop += 1

    def release_slid(self, sequence: SequenceKV, num_computed: int) -> None:
        """Give back window blocks that no token from position ``num_computed`` on sees."""
        for pool, window, table in zip(self.pools, self.windows, sequence.tables, strict=True):
            first = min(self._first_needed(window, num_computed), table.stop)
            if first > table.start:
                pool.release(table.blocks[table.start : first].tolist())
                table.blocks[table.start : first] = 0
                table.start = first

    def index(self, sequence: SequenceKV, keys: Sequence[bytes], num_computed: int) -> None:
        """Offer blocks that have become full to the prefix cache. Call before ``release_slid``."""
        full = num_computed // self.block_size
        for i in range(sequence.num_indexed_blocks, full):
            for pool, table in zip(self.pools, sequence.tables, strict=True):
                if table.start <= i < table.stop:
                    pool.cache(int(table.blocks[i]), keys[i])
        sequence.num_indexed_blocks = max(sequence.num_indexed_blocks, full)

    def free(self, sequence: SequenceKV) -> None:
        """Give back all of a sequence's blocks; it is empty afterwards."""
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            pool.release(reversed(table.held()))
            table.blocks[:] = 0
            table.start = table.stop = 0
        sequence.num_indexed_blocks = 0

    def reset_prefix_cache(self) -> None:
        for pool in self.pools:
            pool.reset_cache()
