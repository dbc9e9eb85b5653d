"""Native rope (``csrc/rope_kv.inl``)."""

from pelton.kernels.tactic import Tactic, all_float32

TACTICS = [Tactic(name="cpu.rope", op="rope", supports=all_float32, batch_invariant=True)]
