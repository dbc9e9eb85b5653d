"""rope_interleaved on NVIDIA GPUs: the kernel of ``rope``."""

from pelton.kernels.rope.cuda import rope_tactic

TACTICS = [rope_tactic("rope_interleaved", interleaved=True)]
