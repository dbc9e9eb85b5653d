"""Native binary_scalar (``csrc/pointwise.inl``)."""

from pelton.kernels.tactic import Tactic, all_float32

TACTICS = [Tactic(name="cpu.binary_scalar", op="binary_scalar", supports=all_float32, batch_invariant=True)]
