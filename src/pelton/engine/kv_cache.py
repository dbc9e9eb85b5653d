"""The paged KV cache of a session: how many blocks, and their memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pelton.dtypes import ITEMSIZE
from pelton.engine.config import EngineConfig, KVGroup
from pelton.engine.resources import available_memory, human_bytes
from pelton.errors import ConfigError

#: Of a cache's type; numpy has no bfloat16 and no fp8: their bit patterns are kept as uint16 and uint8.
NUMPY_TYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "int8": np.int8,
    "float8_e4m3fn": np.uint8,
}

#: Share of the memory left after weights and arena that automatic sizing gives to the cache.
_SHARE = 0.9


@dataclass(frozen=True)
class KVCaches:
    """Each layer's cache, (blocks, kv_heads, block_size, head_dim), by layer.

    Memory is taken from the system untouched, so blocks cost nothing until they are written.
    """

    k: dict[int, npt.NDArray[np.generic]]
    v: dict[int, npt.NDArray[np.generic]]
    num_blocks: tuple[int, ...]


def block_bytes(group: KVGroup, block_size: int, kv_dtype: str) -> int:
    """Bytes of one block over all layers of ``group``, keys and values."""
    values = len(group.layers) * 2 * group.num_kv_heads * block_size * group.head_dim
    return values * ITEMSIZE[kv_dtype]


def sequence_blocks(config: EngineConfig) -> int:
    """Blocks of the longest sequence: the block table's columns."""
    assert config.build.max_seq_len is not None and config.build.block_size is not None
    return -(-config.build.max_seq_len // config.build.block_size)


def limit_blocks(config: EngineConfig) -> tuple[int, ...]:
    """Blocks per group for ``max_batch_size`` sequences of ``max_seq_len``: more are of no use."""
    assert config.build.max_batch_size is not None
    return (config.build.max_batch_size * sequence_blocks(config),) * len(config.model.kv_groups)


def choose_num_blocks(config: EngineConfig, free: int | None = None) -> tuple[int, ...]:
    """Blocks per group for ``max_batch_size`` sequences of ``max_seq_len``, or as many as fit.

    ``free``: bytes that may be used (default: what the system has left besides weights, arena and
    workspace). Raises ``ConfigError`` when not even one longest sequence fits.
    """
    build, memory = config.build, config.memory
    assert build.block_size is not None and build.kv_dtype is not None
    if free is None:
        free = available_memory() - memory.weights - memory.work
    per_block = sum(block_bytes(g, build.block_size, build.kv_dtype) for g in config.model.kv_groups)
    longest = sequence_blocks(config)
    blocks = min(*limit_blocks(config), int(max(0, free) * _SHARE) // per_block)
    if blocks < longest:
        raise ConfigError(
            f"{config.model.name} needs {human_bytes(longest * per_block)} for the KV cache of one sequence "
            f"of {build.max_seq_len} tokens; {human_bytes(max(0, free))} are left besides weights and work "
            f"memory; run it with max_seq_len {max(1, blocks * build.block_size)} or free memory"
        )
    return (blocks,) * len(config.model.kv_groups)


def resolve_num_blocks(
    config: EngineConfig, kv_blocks: int | Sequence[int] | None, free: int | None = None
) -> tuple[int, ...]:
    """``kv_blocks`` as a tuple with one count per KV group; ``free``: see ``choose_num_blocks``.

    Raises ``ConfigError``.
    """
    if kv_blocks is None:
        return choose_num_blocks(config, free)
    groups = len(config.model.kv_groups)
    counts = (kv_blocks,) * groups if isinstance(kv_blocks, int) else tuple(kv_blocks)
    if len(counts) != groups:
        raise ConfigError(f"kv_blocks has {len(counts)} numbers, and the engine has {groups} KV groups")
    if any(n < 1 for n in counts):
        raise ConfigError(f"kv_blocks must be at least 1, not {min(counts)}")
    build = config.build
    assert build.block_size is not None and build.kv_dtype is not None
    sizes = [block_bytes(g, build.block_size, build.kv_dtype) for g in config.model.kv_groups]
    needed = sum(n * size for n, size in zip(counts, sizes, strict=True))
    free = available_memory() if free is None else free
    if needed > free:
        raise ConfigError(
            f"kv_blocks {max(counts)} need {human_bytes(needed)} for the KV cache, and "
            f"{human_bytes(free)} are free; use {max(1, free // sum(sizes))} or less"
        )
    return counts


def allocate(config: EngineConfig, num_blocks: tuple[int, ...]) -> KVCaches:
    """Uninitialised caches of ``num_blocks`` blocks per group."""
    build = config.build
    assert build.block_size is not None and build.kv_dtype is not None
    k: dict[int, npt.NDArray[np.generic]] = {}
    v: dict[int, npt.NDArray[np.generic]] = {}
    for group, blocks in zip(config.model.kv_groups, num_blocks, strict=True):
        shape = (blocks, group.num_kv_heads, build.block_size, group.head_dim)
        for layer in group.layers:
            for caches in (k, v):
                caches[layer] = np.empty(shape, dtype=NUMPY_TYPES[build.kv_dtype])
    return KVCaches(k, v, num_blocks)
