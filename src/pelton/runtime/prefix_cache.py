"""Prefix keys: what names the content of a full KV block.

``key_i = blake2b(key_{i-1} | tokens of block i)``, and ``key_{-1}`` covers whatever else the content
depends on: the engine, the epoch of its weights, and the request's salt. Equal keys mean equal KV in
every group; each group's ``BlockPool`` has its own index from key to block.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

KEY_BYTES = 16


def root_key(engine_id: str, weight_epoch: int, cache_salt: str) -> bytes:
    """The parent of a sequence's first block. Lengths are hashed too: no two field lists collide."""
    hasher = hashlib.blake2b(digest_size=KEY_BYTES)
    for field in (engine_id.encode(), str(weight_epoch).encode(), cache_salt.encode()):
        hasher.update(len(field).to_bytes(8, "little"))
        hasher.update(field)
    return hasher.digest()


def block_key(parent: bytes, tokens: npt.NDArray[np.int32]) -> bytes:
    """The key of the block that follows ``parent`` and holds ``tokens`` (one full block, int32)."""
    return hashlib.blake2b(parent + tokens.tobytes(), digest_size=KEY_BYTES).digest()


class PrefixKeys:
    """The keys of one sequence's full blocks, made as far as asked for and kept."""

    def __init__(self, root: bytes, block_size: int) -> None:
        self._root = root
        self._block_size = block_size
        self._keys: list[bytes] = []

    def upto(self, tokens: npt.NDArray[np.int32], num_blocks: int) -> list[bytes]:
        """Keys of at least the first ``num_blocks`` blocks of ``tokens`` (int32, at least that long)."""
        size = self._block_size
        while len(self._keys) < num_blocks:
            i = len(self._keys)
            parent = self._keys[-1] if i else self._root
            self._keys.append(block_key(parent, tokens[i * size : (i + 1) * size]))
        return self._keys
