"""Native kv_write (``csrc/rope_kv.inl``): float32 in, the cache's type out."""

from pelton.kernels.tactic import NodeSpec, Tactic, native_caches


def _supports(node: NodeSpec) -> bool:
    return native_caches(node, 2, 3)


TACTICS = [Tactic(name="cpu.kv_write", op="kv_write", supports=_supports, batch_invariant=True)]
