"""scale on NVIDIA GPUs."""

from pelton.kernels.activation.cuda import pointwise_tactic

TACTICS = [pointwise_tactic("scale", "scale", "factor")]
