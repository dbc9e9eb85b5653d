"""Native paged attention (``csrc/attention.inl``): float32 queries over a cache of any float type."""

from __future__ import annotations

from pelton.kernels.tactic import NodeSpec, Tactic, TensorSpec, native_caches

#: Keys whose partial result one thread computes at a time (``kChunk`` in the kernel).
CHUNK = 128
#: Sequences whose chunks several threads may share; with more, every sequence stays whole.
SHARED_SEQUENCES = 16
MAX_GROUP = 128


def _shapes(node: NodeSpec) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    q, k_cache, _, table, *_ = node.inputs
    assert q is not None
    assert k_cache is not None
    assert table is not None
    return q, k_cache, table


def _supports(node: NodeSpec) -> bool:
    q, k_cache, _ = _shapes(node)
    return native_caches(node, 1, 2) and int(q.shape[1]) // int(k_cache.shape[1]) <= MAX_GROUP


def _workspace(node: NodeSpec, max_tokens: int) -> int:
    """Partial results: (maximum, sum, output) of each head and chunk. With less, the kernel shares
    out whole sequences only."""
    q, k_cache, table = _shapes(node)
    chunks = -(-int(table.shape[1]) * int(k_cache.shape[2]) // CHUNK)
    return min(SHARED_SEQUENCES, max_tokens) * int(q.shape[1]) * chunks * (int(q.shape[2]) + 2) * 4


TACTICS = [
    Tactic(
        name="cpu.paged_attention",
        op="paged_attention",
        supports=_supports,
        workspace=_workspace,
        batch_invariant=True,
    )
]
