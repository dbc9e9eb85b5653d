"""Native softmax (``csrc/reduce.inl``)."""

from pelton.kernels.tactic import Tactic, all_float32

TACTICS = [Tactic(name="cpu.softmax", op="softmax", supports=all_float32, batch_invariant=True)]
