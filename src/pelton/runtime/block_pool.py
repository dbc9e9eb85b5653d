"""BlockPool: the blocks of one KV group, their reference counts and the prefix cache's index.

A block is *used* (reference count > 0), or *free*. A free block may still hold a cached prefix; it
stays findable until it is needed for something else. Free blocks wait in one queue: blocks without
cached content at the front, cached ones behind them in order of release, so allocation evicts the
least recently used prefix, and only when nothing emptier is left. Nothing is ever copied.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """Blocks 0 .. ``num_blocks`` - 1 of one KV group.

    ``poison`` (tests, debugging) is called with blocks whose content has just become meaningless.
    """

    def __init__(self, num_blocks: int, poison: Callable[[Sequence[int]], None] | None = None) -> None:
        self.num_blocks = num_blocks
        self._poison = poison
        self._ref_counts = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached or not."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks findable by key, used or free."""
        return len(self._by_key)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def find(self, key: bytes) -> int | None:
        """The block that holds the content ``key`` names. It may be free: ``acquire`` it to keep it."""
        return self._by_key.get(key)

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` are free, so that acquiring them would use up free blocks."""
        return sum(1 for block in blocks if self._ref_counts[block] == 0)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Take one more reference to each found block."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1

    def allocate(self, n: int) -> list[int]:
        """``n`` blocks of undefined content, each with one reference; the caller checked ``num_free``."""
        assert n <= len(self._free), f"{n} blocks wanted, {len(self._free)} free"
        blocks = [self._free.popitem(last=False)[0] for _ in range(n)]
        evicted = []
        for block in blocks:
            self._ref_counts[block] = 1
            if self._forget(block):
                evicted.append(block)
        if evicted and self._poison:
            self._poison(evicted)
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each. Of cached blocks that become free, the first given is evicted
        first: give a sequence's blocks from its end, for its beginning is the likelier to be shared."""
        emptied = []
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} released twice"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if self._keys[block] is None:
                    self._free.move_to_end(block, last=False)
                    emptied.append(block)
        if emptied and self._poison:
            self._poison(emptied)

    def cache(self, block: int, key: bytes) -> None:
        """Make a used, full block findable. If an equal block is cached already, that one stays."""
        assert self._ref_counts[block] > 0, f"block {block} is cached but not used"
        if self._keys[block] is None and key not in self._by_key:
            self._keys[block] = key
            self._by_key[key] = block

    def reset_cache(self) -> None:
        """Forget all cached content (the weights changed); used blocks stay used."""
        for block in list(self._by_key.values()):
            self._forget(block)

    def _forget(self, block: int) -> bool:
        key = self._keys[block]
        if key is None:
            return False
        del self._by_key[key]
        self._keys[block] = None
        return True

    def check(self) -> None:
        """Raise ``AssertionError`` when the books do not balance. For tests and idle checks."""
        for block, count in enumerate(self._ref_counts):
            assert count >= 0, f"block {block} has reference count {count}"
            assert (count == 0) == (block in self._free), f"block {block}: count {count}, free queue differs"
        for key, block in self._by_key.items():
            assert self._keys[block] == key, f"block {block} is indexed under another key"
        assert sum(key is not None for key in self._keys) == len(self._by_key)
