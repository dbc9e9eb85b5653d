"""BlockPool and KVCacheManager: sharing, eviction order, windows, hybrid hits, atomic allocation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pelton.engine.config import KVGroup
from pelton.runtime.block_pool import BlockPool
from pelton.runtime.kv_cache import KVCacheManager, SequenceKV
from pelton.runtime.prefix_cache import PrefixKeys, block_key, root_key

BLOCK = 4


def make_manager(windows: Sequence[int], num_blocks: Sequence[int]) -> KVCacheManager:
    groups = [
        KVGroup(layers=(g,), num_kv_heads=1, head_dim=4, window=window) for g, window in enumerate(windows)
    ]
    return KVCacheManager(groups, num_blocks, block_size=BLOCK, max_seq_len=64)


def keys_of(tokens: Sequence[int]) -> list[bytes]:
    keys = PrefixKeys(root_key("engine", 0, ""), BLOCK)
    return keys.upto(np.array(tokens, np.int32), len(tokens) // BLOCK)


def compute(manager: KVCacheManager, tokens: Sequence[int], sequence: SequenceKV | None = None) -> SequenceKV:
    """Allocate, index and slide as if ``tokens`` had been computed, one block at a time."""
    sequence = sequence or manager.new_sequence()
    keys = keys_of(tokens)
    for end in [*range(BLOCK, len(tokens), BLOCK), len(tokens)]:
        assert manager.allocate(sequence, end)
        manager.index(sequence, keys, end)
        manager.release_slid(sequence, end)
    return sequence


def test_the_least_recently_used_prefix_is_evicted_and_empty_blocks_go_first() -> None:
    pool = BlockPool(4)
    a, b, c, d = pool.allocate(4)
    for block, key in ((a, b"a"), (b, b"b"), (c, b"c")):
        pool.cache(block, key)
    pool.release([b])
    pool.release([a])
    pool.release([d])
    pool.release([c])
    assert pool.num_free == 4
    assert pool.allocate(1) == [d], "the block without cached content"
    assert (pool.find(b"a"), pool.find(b"b"), pool.find(b"c")) == (a, b, c)
    assert pool.allocate(1) == [b], "released first"
    assert pool.find(b"b") is None
    pool.acquire([a])
    assert pool.allocate(1) == [c], "a is in use"
    assert pool.find(b"a") == a
    pool.check()


def test_a_shared_block_is_free_only_after_its_last_user() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.cache(block, b"k")
    pool.acquire([block])
    pool.release([block])
    assert (pool.num_used, pool.ref_count(block)) == (1, 1)
    pool.release([block])
    assert pool.num_used == 0
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([block])


def test_of_equal_blocks_the_first_stays_cached() -> None:
    pool = BlockPool(2)
    a, b = pool.allocate(2)
    pool.cache(a, b"k")
    pool.cache(b, b"k")
    pool.release([a, b])
    assert pool.find(b"k") == a
    assert pool.allocate(1) == [b]
    pool.check()


def test_blocks_are_poisoned_when_their_content_becomes_meaningless() -> None:
    poisoned: list[int] = []
    pool = BlockPool(2, poisoned.extend)
    a, b = pool.allocate(2)
    pool.cache(a, b"k")
    pool.release([a, b])
    assert poisoned == [b], "a can still be found"
    pool.allocate(2)
    assert poisoned == [b, a]


def test_a_reset_forgets_cached_content_only() -> None:
    manager = make_manager([0], [8])
    sequence = compute(manager, range(9))
    manager.reset_prefix_cache()
    assert manager.find_prefix(keys_of(range(9)), 9).num_tokens == 0
    assert manager.pools[0].num_used == 3
    manager.free(sequence)
    manager.pools[0].check()


def test_keys_depend_on_everything_before_and_on_what_the_root_covers() -> None:
    tokens = np.arange(8, dtype=np.int32)
    roots = [root_key("e", 0, ""), root_key("f", 0, ""), root_key("e", 1, ""), root_key("e", 0, "s")]
    roots += [root_key("e", 0, "0"), root_key("e0", 0, "")]
    keys = {PrefixKeys(root, BLOCK).upto(tokens, 2)[1] for root in roots}
    assert len(keys) == len(roots)
    assert block_key(b"x", tokens[:4]) != block_key(b"x", tokens[4:])


def test_a_prefix_is_shared_without_copies() -> None:
    manager = make_manager([0], [10])
    tokens = list(range(14))
    first = compute(manager, tokens)
    hit = manager.find_prefix(keys_of(tokens), 14)
    assert hit.num_tokens == 12
    second = manager.new_sequence()
    manager.adopt(second, hit)
    assert manager.allocate(second, 14)
    assert first.tables[0].held()[:3] == second.tables[0].held()[:3]
    assert first.tables[0].held()[3] != second.tables[0].held()[3]
    assert manager.pools[0].num_used == 5
    manager.free(first)
    assert manager.pools[0].num_used == 4
    manager.free(second)
    assert manager.pools[0].num_used == 0


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
def test_a_window_keeps_only_what_is_still_seen(window: int) -> None:
    manager = make_manager([window], [16])
    sequence = manager.new_sequence()
    most = 0
    for length in range(1, 41):
        assert manager.allocate(sequence, length)
        table = sequence.tables[0]
        most = max(most, table.stop - table.start)
        manager.release_slid(sequence, length)
        first_seen = max(0, length - window + 1)
        assert table.start == min(first_seen // BLOCK, table.stop)
        assert not table.blocks[: table.start].any(), "entries that slid out are 0"
        manager.pools[0].check()
    assert most == min(10, (window - 2) // BLOCK + 2)


def test_allocation_takes_all_groups_or_none() -> None:
    manager = make_manager([0, 8], [8, 2])
    sequence = manager.new_sequence()
    assert not manager.allocate(sequence, 9)
    assert [pool.num_used for pool in manager.pools] == [0, 0]
    assert manager.allocate(sequence, 8)
    assert [pool.num_used for pool in manager.pools] == [2, 2]


def test_a_hybrid_hit_needs_the_window_of_its_next_token_only() -> None:
    manager = make_manager([0, 6], [32, 32])
    tokens = list(range(24))
    sequence = compute(manager, tokens)
    manager.free(sequence)
    keys = keys_of(tokens)
    # A query at 20 sees 15 .. 20: blocks 3 (12-15) and 4; at 23 (full hit) 18 .. 23: blocks 4 and 5.
    hit = manager.find_prefix([*keys[:5], b"other"], 24)
    assert (hit.num_tokens, hit.blocks[1][0], len(hit.blocks[0][1])) == (20, 3, 5)
    full = manager.find_prefix(keys, 24)
    assert (full.num_tokens, full.blocks[1][0]) == (24, 4)


def test_a_hybrid_hit_shrinks_to_where_both_groups_have_their_blocks() -> None:
    manager = make_manager([0, 6], [32, 4])
    tokens = list(range(24))
    keys = keys_of(tokens)
    manager.free(compute(manager, tokens))
    # Other sequences push the window group's oldest cached blocks out; of 24 tokens, the last stay.
    manager.pools[1].allocate(2)
    hit = manager.find_prefix(keys, 24)
    run = [manager.pools[1].find(key) is not None for key in keys]
    assert run == [False, False, False, False, True, True]
    assert hit.num_tokens == 24
    assert manager.find_prefix(keys[:5], 23).num_tokens == 0, "a query at 20 sees block 3, which is gone"


def test_windows_alone_hit_without_the_beginning() -> None:
    manager = make_manager([6], [3])
    tokens = list(range(24))
    manager.free(compute(manager, tokens))
    hit = manager.find_prefix(keys_of(tokens), 25)
    assert hit.num_tokens == 24
    assert hit.blocks[0][0] == 4


@pytest.mark.parametrize(
    ("windows", "num_blocks", "expected"),
    [([0], [5], 20), ([0], [99], 64), ([6], [3], 64), ([6], [2], 8), ([6], [1], 4), ([0, 6], [9, 3], 36)],
)
def test_max_tokens(windows: list[int], num_blocks: list[int], expected: int) -> None:
    assert make_manager(windows, num_blocks).max_tokens() == expected


def test_blocks_of_a_sequence_are_evicted_from_its_end() -> None:
    manager = make_manager([0], [4])
    tokens = list(range(16))
    manager.free(compute(manager, tokens))
    manager.pools[0].allocate(2)
    assert manager.find_prefix(keys_of(tokens), 17).num_tokens == 8
