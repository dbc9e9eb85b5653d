"""What algorithms know of a linear layer's input: statistics of calibration text, of bounded size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pelton.ir.blocks import dequantize
from pelton.ir.tensors import HostTensor

Float32 = npt.NDArray[np.float32]

#: Rows of activations that are kept, and how many of one call.
SAMPLE, SAMPLE_OF_CALL = 256, 16
#: Rows of a Gram matrix that are added to at a time.
STRIP = 1024
#: Rows of a weight whose errors are computed at a time.
_ROWS = 512


@dataclass
class InputStatistics:
    """Of the inputs x (tokens, K) that a layer has seen."""

    gram: Float32
    """(K, K): sum of x^T x. GPTQ's Hessian is twice this, and ``output_error`` needs no more."""
    abs_sum: Float32
    """(K,): sum of |x|."""
    abs_max: Float32
    """(K,)."""
    sample: Float32
    """(rows, K): some of the inputs."""
    tokens: int = 0

    @staticmethod
    def empty(columns: int) -> InputStatistics:
        """Before anything was seen."""
        return InputStatistics(
            np.zeros((columns, columns), np.float32),
            np.zeros(columns, np.float32),
            np.zeros(columns, np.float32),
            np.zeros((0, columns), np.float32),
        )

    def add(self, x: Float32) -> None:
        """See ``x`` (tokens, K); what is not finite in it stays so in the Gram matrix."""
        # Strips, as a product of the Gram matrix's size would lie beside it.
        for start in range(0, x.shape[1], STRIP):
            strip = slice(start, start + STRIP)
            with np.errstate(over="ignore", invalid="ignore"):
                self.gram[strip] += x[:, strip].T @ x
            size = np.abs(x[:, strip])
            self.abs_sum[strip] += size.sum(axis=0)
            self.abs_max[strip] = np.maximum(self.abs_max[strip], size.max(axis=0))
        wanted = min(SAMPLE_OF_CALL, SAMPLE - len(self.sample), len(x))
        if wanted > 0:
            rows = np.linspace(0, len(x) - 1, wanted).astype(int)
            self.sample = np.concatenate([self.sample, x[rows]])
        self.tokens += len(x)

    @property
    def abs_mean(self) -> Float32:
        """(K,): mean of |x|."""
        return self.abs_sum / np.float32(max(1, self.tokens))

    def divide(self, s: Float32) -> None:
        """Make these the statistics of x / s, with a factor ``s`` (K,) for each channel."""
        self.gram /= s
        self.gram /= s[:, None]
        self.abs_sum /= s
        self.abs_max /= s
        self.sample /= s


def output_error(difference: Float32, gram: Float32) -> float:
    """Sum over the inputs x behind ``gram`` of ||difference x||^2; difference (rows, K)."""
    parts = (difference[i : i + _ROWS] for i in range(0, len(difference), _ROWS))
    return sum(float(np.einsum("ij,ij->", part @ gram, part, dtype=np.float64)) for part in parts)


def relative_errors(weight: Float32, rounded: HostTensor, gram: Float32 | None) -> tuple[float, float]:
    """Relative errors (root of summed squares) of a layer's weight (rows, K) and of its output; the output's
    is NaN without a Gram matrix, and 0 where the output is 0."""
    sizes = [0.0] * 4
    for i in range(0, len(weight), _ROWS):
        part = weight[i : i + _ROWS]
        difference = dequantize(HostTensor(rounded.quant, part.shape, rounded.data[i : i + _ROWS])) - part
        for at, values in enumerate((difference, part)):
            sizes[at] += float(np.square(values, dtype=np.float64).sum())
            sizes[at + 2] += 0.0 if gram is None else output_error(values, gram)
    error, total, of_output, output = sizes
    of_weight = (error / total) ** 0.5 if total else 0.0
    if gram is None:
        return of_weight, float("nan")
    return of_weight, (max(0.0, of_output) / output) ** 0.5 if output > 0 else 0.0
