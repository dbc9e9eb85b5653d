"""Native reduce (``csrc/reduce.inl``)."""

from pelton.kernels.tactic import Tactic, all_float32

TACTICS = [Tactic(name="cpu.reduce", op="reduce", supports=all_float32, batch_invariant=True)]
