"""Native kv_write (``csrc/rope_kv.inl``): float32 in, the cache's type out."""

from pelton.kernels.tactic import CACHE_DTYPES, MAX_HEAD_DIM, NodeSpec, Tactic, all_float32

CACHES = (2, 3)


def _supports(node: NodeSpec) -> bool:
    k_cache, v_cache = (node.inputs[i] for i in CACHES)
    assert k_cache is not None
    assert v_cache is not None
    return (
        all_float32(node, besides=CACHES)
        and k_cache.dtype == v_cache.dtype
        and k_cache.dtype in CACHE_DTYPES
        and int(k_cache.shape[3]) <= MAX_HEAD_DIM
    )


TACTICS = [Tactic(name="cpu.kv_write", op="kv_write", supports=_supports, batch_invariant=True)]
