"""Native softcap (``csrc/elementwise.inl``)."""

from pelton.kernels.tactic import Tactic, all_float32

TACTICS = [Tactic(name="cpu.softcap", op="softcap", supports=all_float32, batch_invariant=True)]
