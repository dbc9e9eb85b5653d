"""Native unary (``csrc/pointwise.inl``)."""

from pelton.kernels.tactic import Tactic, all_float32

TACTICS = [Tactic(name="cpu.unary", op="unary", supports=all_float32, batch_invariant=True)]
