"""SmoothQuant (Xiao et al. 2022, "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large
Language Models").

Activations have a few channels far larger than the rest, weights have not. Dividing channel j of the input
by s_j = max|x_j|^a / max|w_j|^(1 - a), and multiplying the weights' column by it, shares the difficulty.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.group_blocks import Float32
from pelton.ir.group_encoder import largest_size
from pelton.quant.activations import rounded_activations, static_scale
from pelton.quant.awq import Rounder
from pelton.quant.statistics import InputStatistics

#: Strengths that are tried, besides no scaling.
ALPHAS = tuple(i / 20 for i in range(2, 20))


def smooth_scales(abs_max: Float32, weights: Sequence[Float32], alpha: float) -> Float32:
    """s (K,) of an input with channel maxima ``abs_max`` that ``weights`` (rows, K) share; 1 where a channel
    or its weights are all 0."""
    of_weights = np.max([largest_size(w, 0) for w in weights], axis=0)
    live = (abs_max > 0) & (of_weights > 0)
    x, w = np.where(live, abs_max, 1).astype(np.float64), np.where(live, of_weights, 1).astype(np.float64)
    s = np.maximum(x**alpha / w ** (1 - alpha), 1e-5)
    return np.where(live, s, 1).astype(np.float32)


def search_scales(
    weights: Sequence[Float32],
    statistics: InputStatistics,
    rounded: Sequence[Rounder],
    activations: ActivationQuant,
    alpha: float | None = None,
    agreeing: Rounder = lambda s: s,
) -> tuple[Float32, float | None]:
    """The factors and the strength with the smallest error of the quantised products' outputs over the
    statistics' sample, all ``weights`` together; (ones, None) where no scaling is best. Arguments: AWQ's."""
    x = statistics.sample
    exact = [x @ w.T for w in weights]

    def error(s: Float32) -> float:
        quant = settled(activations, statistics.abs_max / s)
        smooth = rounded_activations(x / s, quant)
        return sum(
            float(np.square(smooth @ values(w * s).T - y, dtype=np.float64).sum())
            for w, values, y in zip(weights, rounded, exact, strict=True)
        )

    none = np.ones(len(statistics.gram), np.float32)
    if alpha is not None:
        return agreeing(smooth_scales(statistics.abs_max, weights, alpha)), alpha
    tried: list[tuple[float, Float32, float | None]] = [(error(none), none, None)]
    for a in ALPHAS:
        s = agreeing(smooth_scales(statistics.abs_max, weights, a))
        tried.append((error(s), s, a))
    _, s, found = min(tried, key=lambda row: row[0])
    return s, found


def settled(activations: ActivationQuant, abs_max: Float32) -> ActivationQuant:
    """``activations`` with a static scale measured where it asks for one (a negative ``scale``)."""
    if activations.scale >= 0:
        return activations
    scale = static_scale(float(abs_max.max()), activations.dtype)
    a = activations
    return ActivationQuant(a.dtype, a.per, a.group, scale or 1.0, a.outliers)
