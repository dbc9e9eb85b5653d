"""Native add_rms_norm (``csrc/norm.inl``)."""

from pelton.kernels.tactic import Tactic, all_float32

TACTICS = [Tactic(name="cpu.add_rms_norm", op="add_rms_norm", supports=all_float32, batch_invariant=True)]
