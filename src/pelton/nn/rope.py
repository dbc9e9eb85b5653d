"""Rotary position embedding: frequency tables of every scaling that checkpoints use.

A scaling is described by a dict like Hugging Face's ``rope_parameters``: ``rope_type``,
``rope_theta``, ``partial_rotary_factor`` and the type's own keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pelton.errors import CheckpointError
from pelton.nn import functional as F
from pelton.nn.module import Module

Parameters = Mapping[str, Any]


class RotaryEmbedding(Module):
    """The rotations of a step's positions, computed once and shared by all layers of one table.

    ``inv_freq`` (R/2,) float32 is a constant of the model, so it has values even in a model made on
    the meta device.
    """

    inv_freq: Any

    def __init__(self, inv_freq: Any, scale: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.scale = scale

    def forward(self, positions_T: Any) -> Any:
        """``positions_T`` int32 -> (T, R) float32."""
        return F.rope_cos_sin(positions_T, self.inv_freq, self.scale)


def rope_frequencies(
    parameters: Parameters, *, head_dim: int, max_position_embeddings: int, max_seq_len: int
) -> tuple[Any, float]:
    """``inv_freq`` (R/2,) float32 on the CPU, and the factor that multiplies cos and sin.

    Formulas as in Hugging Face's ``modeling_rope_utils``. There, "dynamic" and "longrope" change
    their frequencies with the longest sequence seen so far; an engine's table is fixed, chosen for
    its ``max_seq_len``: "dynamic" stretches for that length (or not at all up to
    ``max_position_embeddings``) and "longrope" takes ``long_factor`` when ``max_seq_len`` exceeds
    ``original_max_position_embeddings``, else ``short_factor``. So a text's result never depends on
    other requests, and equals Hugging Face's at that length.

    Raises ``CheckpointError`` on an unknown type or a missing key.
    """
    kind = parameters.get("rope_type", "default")
    if kind not in _SCALINGS:
        raise CheckpointError(
            f"rope_type {kind!r} is not implemented (known: {', '.join(sorted(_SCALINGS))})"
        )
    rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    theta = float(parameters["rope_theta"])
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
    try:
        inv_freq, scale = _SCALINGS[kind](
            parameters, theta, exponent, rotary_dim, max_position_embeddings, max_seq_len
        )
    except KeyError as missing:
        raise CheckpointError(f"rope_type {kind!r} needs {missing} in the model's configuration") from None
    return inv_freq, float(scale)


def _default(
    p: Parameters, theta: float, exponent: Any, dim: int, max_positions: int, max_seq_len: int
) -> tuple[Any, float]:
    return 1.0 / theta**exponent, 1.0


def _linear(
    p: Parameters, theta: float, exponent: Any, dim: int, max_positions: int, max_seq_len: int
) -> tuple[Any, float]:
    """Position interpolation (Chen et al., 2023)."""
    return 1.0 / theta**exponent / p["factor"], 1.0


def _dynamic(
    p: Parameters, theta: float, exponent: Any, dim: int, max_positions: int, max_seq_len: int
) -> tuple[Any, float]:
    """NTK-aware scaling (bloc97, emozilla, 2023) for ``max_seq_len``."""
    factor, length = p["factor"], max(max_seq_len, max_positions)
    stretch = factor * length / max_positions - (factor - 1)
    theta *= stretch ** (dim / (dim - 2))
    return 1.0 / theta**exponent, 1.0


def _llama3(
    p: Parameters, theta: float, exponent: Any, dim: int, max_positions: int, max_seq_len: int
) -> tuple[Any, float]:
    """Long wavelengths divided by ``factor``, short ones kept, smooth between (Llama 3.1)."""
    factor, low, high = p["factor"], p["low_freq_factor"], p["high_freq_factor"]
    original = p.get("original_max_position_embeddings", max_positions)
    inv_freq = 1.0 / theta**exponent
    wavelength = 2 * math.pi / inv_freq
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    long, short = wavelength > original / low, wavelength < original / high
    return torch.where(long, inv_freq / factor, torch.where(short, inv_freq, blended)), 1.0


def _yarn(
    p: Parameters, theta: float, exponent: Any, dim: int, max_positions: int, max_seq_len: int
) -> tuple[Any, float]:
    """YaRN (Peng et al., 2023): interpolate slow dimensions, keep fast ones, ramp between."""
    original = p.get("original_max_position_embeddings", max_positions)
    factor = p.get("factor") or max_positions / original

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_of(p.get("beta_fast") or 32)
    high = dimension_of(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    index = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
    keep = 1 - ((index - low) / (high - low)).clamp(0, 1)
    frequency = theta**exponent
    inv_freq = 1.0 / (factor * frequency) * (1 - keep) + 1.0 / frequency * keep
    scale = p.get("attention_factor")
    if scale is None:
        mscale, mscale_all = p.get("mscale"), p.get("mscale_all_dim")
        if mscale and mscale_all:
            scale = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all)
        else:
            scale = _yarn_mscale(factor, 1.0)
    return inv_freq, scale


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(
    p: Parameters, theta: float, exponent: Any, dim: int, max_positions: int, max_seq_len: int
) -> tuple[Any, float]:
    """LongRoPE (Ding et al., 2024): a searched factor for every dimension (Phi-3)."""
    original = p.get("original_max_position_embeddings", max_positions)
    factor = p.get("factor") or max_positions / original
    scale = p.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    key = "long_factor" if max_seq_len > original else "short_factor"
    stretch = torch.tensor(p[key], dtype=torch.float32, device="cpu")
    if stretch.shape != exponent.shape:
        raise CheckpointError(
            f"rope {key} has {stretch.numel()} values; the rotary dimension {dim} needs {dim // 2}"
        )
    return 1.0 / (stretch * theta**exponent), scale


_SCALINGS: dict[str, Callable[..., tuple[Any, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
