"""Native take_rows (``csrc/take_rows.cpp``)."""

from pelton.kernels.tactic import Tactic, all_float32

TACTICS = [Tactic(name="cpu.take_rows", op="take_rows", supports=all_float32, batch_invariant=True)]
