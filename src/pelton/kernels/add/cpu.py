"""Native add (``csrc/elementwise.inl``)."""

from pelton.kernels.tactic import Tactic, all_float32

TACTICS = [Tactic(name="cpu.add", op="add", supports=all_float32, batch_invariant=True)]
