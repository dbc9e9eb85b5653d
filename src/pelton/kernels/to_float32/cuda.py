"""to_float32 on NVIDIA GPUs."""

from pelton.kernels.activation.cuda import pointwise_tactic

TACTICS = [pointwise_tactic("to_float32", "copy")]
