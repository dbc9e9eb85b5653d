"""Native rope_kv_write (``csrc/rope_kv.inl``): float32 in, the cache's type out."""

from pelton.kernels.tactic import NodeSpec, Tactic, native_caches


def _supports(node: NodeSpec) -> bool:
    return native_caches(node, 4, 5)


TACTICS = [Tactic(name="cpu.rope_kv_write", op="rope_kv_write", supports=_supports, batch_invariant=True)]
