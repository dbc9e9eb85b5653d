"""softmax on NVIDIA GPUs (``reduce/triton_reduce.py``)."""

from pelton.kernels.reduce.cuda import tactic

TACTICS = [tactic("softmax", "softmax")]
