"""Native quantize_q8 (``csrc/quantise.inl``)."""

from pelton.kernels.tactic import Tactic, all_float32

TACTICS = [Tactic(name="cpu.quantize_q8", op="quantize_q8", supports=all_float32, batch_invariant=True)]
