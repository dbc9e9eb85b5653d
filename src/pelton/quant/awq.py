"""AWQ (Lin et al. 2023, "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration").

Channels whose activations are large matter most, and a channel whose weights are multiplied by s > 1 (and
whose activations by 1 / s) loses less to rounding. So s = |x|^a, |x| a channel's mean size, with the exponent
a that gives the smallest error of the layer's output, all layers that share the input taken together. Then
each group's range is shrunk (clipped) where that lowers the error of the group's own contribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from pelton.ir.group_blocks import Float32, group_of
from pelton.ir.group_encoder import codes_of, encode_with, fit, into_groups, values_of
from pelton.ir.tensors import HostTensor
from pelton.quant.statistics import InputStatistics, output_error

#: Of a weight, the values that it is stored as.
Rounder = Callable[[Float32], Float32]

#: Exponents that are tried, 0 (no scaling) among them.
GRID = 20
#: Shares of a group's range that are tried, from all of it.
CLIPS = tuple(1 - i / 20 for i in range(10))
#: Values whose clipping is searched at a time.
_CHUNK = 1 << 20


def search_scales(
    weights: Sequence[Float32],
    statistics: InputStatistics,
    rounded: Sequence[Rounder],
    alpha: float | None = None,
    agreeing: Rounder = lambda s: s,
) -> tuple[Float32, float]:
    """The factors s (K,) of the channels of an input that ``weights`` (rows, K) share, and the exponent.

    ``rounded`` gives the values that each weight is stored as. s is normalised to a geometric mean of its
    extremes of 1. ``alpha``: this exponent instead of a search. ``agreeing``: the nearest factors that can be
    folded.
    """
    grid = [i / GRID for i in range(GRID)] if alpha is None else [alpha]
    best, found, exponent = float("inf"), np.ones(len(statistics.gram), np.float32), 0.0
    for a in grid:
        s = agreeing(channel_scales(statistics.abs_mean, a))
        error = 0.0
        for w, values in zip(weights, rounded, strict=True):
            difference = values(w * s)
            difference /= s
            difference -= w
            error += output_error(difference, statistics.gram)
        if error < best:
            best, found, exponent = error, s, a
    return found, exponent


def channel_scales(abs_mean: Float32, alpha: float) -> Float32:
    """|x|^alpha, normalised; channels that are always 0 keep a factor within the others' range."""
    seen = abs_mean > 0
    if alpha == 0 or not seen.any():
        return np.ones(len(abs_mean), np.float32)
    size = np.maximum(abs_mean, abs_mean[seen].min()).astype(np.float64) ** alpha
    size = np.maximum(size / np.sqrt(size.max() * size.min()), 1e-4)
    scales: Float32 = size.astype(np.float32)
    return scales


def clipped_nearest(weight: Float32, gram: Float32, quant: str, *, symmetric: bool) -> HostTensor:
    """``weight`` rounded to nearest, each group's range shrunk by the factor of ``CLIPS`` with the smallest
    error over the inputs of Gram matrix ``gram``, the group taken by itself."""
    grouped = into_groups(weight, quant)
    rows, groups, size = grouped.shape
    within = np.stack([gram[i : i + size, i : i + size] for i in range(0, groups * size, group_of(quant))])
    step = max(1, _CHUNK // (groups * size))
    parts = [_best_clips(grouped[i : i + step], within, quant, symmetric) for i in range(0, rows, step)]
    d, z = (np.concatenate(part) for part in zip(*parts, strict=True))
    scales = fit(grouped, quant, symmetric=symmetric)._replace(d=d, z=z)
    return encode_with(grouped, scales, quant)


def _best_clips(
    grouped: Float32, within: Float32, quant: str, symmetric: bool
) -> tuple[Float32, npt.NDArray[np.uint8]]:
    top = np.abs(grouped).max(axis=-1, keepdims=True)
    best = np.full(grouped.shape[:2], np.inf)
    d, z = np.zeros(best.shape, np.float32), np.zeros(best.shape, np.uint8)
    for share in CLIPS:
        limit = top * np.float32(share)
        scales = fit(np.clip(grouped, -limit, limit), quant, symmetric=symmetric)
        assert scales.z is not None
        difference = values_of(codes_of(grouped, scales, quant), scales, quant) - grouped
        # Sum over a group's channels i, j of e_i gram_ij e_j.
        seen = np.matmul(difference.swapaxes(0, 1), within)
        error = np.einsum("grj,grj->rg", seen, difference.swapaxes(0, 1))
        better = error < best
        best = np.where(better, error, best)
        d, z = np.where(better, scales.d, d), np.where(better, scales.z, z)
    return d, z
