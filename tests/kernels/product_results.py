"""What products have around their sums, for tests of kernels that run on a CPU."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pelton.ir.tensors import bf16_to_f32
from pelton.kernels.linear.products import Form

#: Of results in bfloat16 whose sums are in float32.
TOLERANCE = 5e-3


def relative_error(
    out: npt.NDArray[np.uint16],
    sums: npt.NDArray[np.float64],
    form: Form,
    bias: npt.NDArray[np.float32] | None,
    residual: npt.NDArray[np.uint16],
) -> float:
    """Of ``out`` (tokens, n) in bfloat16, which ``form`` makes of ``sums`` (tokens, n; gated 2 n): with
    bias, activation (SiLU) and residual."""
    y = sums if bias is None else sums + bias
    if form.gated:
        n = y.shape[1] // 2
        y = y[:, :n] / (1 + np.exp(-y[:, :n])) * y[:, n:]
    if form.residual is not None:
        y = y + bf16_to_f32(residual)
    return float(np.linalg.norm(bf16_to_f32(out) - y) / np.linalg.norm(y))
