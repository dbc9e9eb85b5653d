"""Native rope_interleaved (``csrc/rope_interleaved.cpp``)."""

from pelton.kernels.tactic import Tactic, all_float32

TACTICS = [
    Tactic(name="cpu.rope_interleaved", op="rope_interleaved", supports=all_float32, batch_invariant=True)
]
