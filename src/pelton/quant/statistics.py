"""What algorithms know of a linear layer's input: statistics of calibration text, of bounded size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]

#: Rows of activations that are kept, and how many of one call.
SAMPLE, SAMPLE_OF_CALL = 256, 16
#: Rows of a Gram matrix that are added to at a time.
STRIP = 1024


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
        """See ``x`` (tokens, K)."""
        # Strips, as a product of the Gram matrix's size would lie beside it.
        for start in range(0, x.shape[1], STRIP):
            strip = slice(start, start + STRIP)
            self.gram[strip] += x[:, strip].T @ x
        size = np.abs(x)
        self.abs_sum += size.sum(axis=0)
        np.maximum(self.abs_max, size.max(axis=0), out=self.abs_max)
        wanted = min(SAMPLE_OF_CALL, SAMPLE - len(self.sample), len(x))
        if wanted > 0:
            rows = np.linspace(0, len(x) - 1, wanted).astype(int)
            self.sample = np.concatenate([self.sample, x[rows]])
        self.tokens += len(x)

    @property
    def abs_mean(self) -> Float32:
        """(K,): mean of |x|."""
        return self.abs_sum / np.float32(max(1, self.tokens))

    def divided(self, s: Float32) -> InputStatistics:
        """Of x / s, with a factor ``s`` (K,) for each channel."""
        gram = self.gram / s
        gram /= s[:, None]
        return InputStatistics(gram, self.abs_sum / s, self.abs_max / s, self.sample / s, self.tokens)


def output_error(difference: Float32, gram: Float32) -> float:
    """Sum over the inputs x behind ``gram`` of ||difference x||^2; difference (rows, K)."""
    return float(np.einsum("ij,ij->", difference @ gram, difference, dtype=np.float64))


def relative_errors(weight: Float32, rounded: Float32, gram: Float32 | None) -> tuple[float, float]:
    """Relative errors (root of summed squares) of a layer's weight and of its output; the output's is NaN
    without a Gram matrix, and 0 where the output is 0."""
    difference = rounded - weight
    total = float(np.square(weight, dtype=np.float64).sum())
    error = float(np.square(difference, dtype=np.float64).sum())
    of_weight = (error / total) ** 0.5 if total else 0.0
    if gram is None:
        return of_weight, float("nan")
    total = output_error(weight, gram)
    return of_weight, (max(0.0, output_error(difference, gram)) / total) ** 0.5 if total > 0 else 0.0
