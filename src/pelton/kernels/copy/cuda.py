"""copy on NVIDIA GPUs (``binary/triton_broadcast.py``)."""

from pelton.kernels.binary.cuda import tactic

TACTICS = [tactic("copy", attribute="")]
