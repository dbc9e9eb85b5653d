"""Native rope_cos_sin (``csrc/rope_kv.inl``)."""

from pelton.kernels.tactic import Tactic, all_float32

TACTICS = [Tactic(name="cpu.rope_cos_sin", op="rope_cos_sin", supports=all_float32, batch_invariant=True)]
