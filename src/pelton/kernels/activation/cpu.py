"""Native activation (``csrc/elementwise.inl``)."""

from pelton.kernels.tactic import NodeSpec, Tactic, all_float32

KINDS = ("silu", "gelu", "gelu_tanh", "relu")


def _supports(node: NodeSpec) -> bool:
    return all_float32(node) and node.attrs["kind"] in KINDS


TACTICS = [Tactic(name="cpu.activation", op="activation", supports=_supports, batch_invariant=True)]
