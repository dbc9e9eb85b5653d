"""Native layer_norm (``csrc/norm.inl``)."""

from pelton.kernels.tactic import Tactic, all_float32

TACTICS = [Tactic(name="cpu.layer_norm", op="layer_norm", supports=all_float32, batch_invariant=True)]
