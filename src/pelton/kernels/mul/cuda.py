"""mul on NVIDIA GPUs."""

from pelton.kernels.activation.cuda import pointwise_tactic

TACTICS = [pointwise_tactic("mul", "mul")]
