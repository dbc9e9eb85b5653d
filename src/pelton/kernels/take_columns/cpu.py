"""Native take_columns (``csrc/take_columns.cpp``)."""

from pelton.kernels.tactic import Tactic, all_float32

TACTICS = [Tactic(name="cpu.take_columns", op="take_columns", supports=all_float32, batch_invariant=True)]
