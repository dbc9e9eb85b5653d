"""binary_scalar on NVIDIA GPUs (``binary/triton_broadcast.py``)."""

from pelton.kernels.binary.cuda import tactic

TACTICS = [tactic("binary_scalar", number="value")]
