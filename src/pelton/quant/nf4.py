"""NF4 with double quantisation (Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs").

Scales of 64 values are themselves stored as 8-bit floats, in groups of 256, after their mean is taken off:
8.5 / 64 + 32 / (64 * 256) bits a value instead of 32 / 64. Pelton's nf4_g64 keeps a float32 scale a group, so
here the scales only take the values that double quantisation leaves them.
"""

from __future__ import annotations

import numpy as np

from pelton.ir.group_blocks import E4M3, E4M3_MAX, Float32, to_e4m3
from pelton.ir.group_encoder import encode_with, fit, into_groups
from pelton.ir.tensors import HostTensor

#: Scales that share a scale of scales.
SCALES = 256


def double_quantized(d: Float32) -> Float32:
    """Scales (any shape) as double quantisation keeps them: mean + c2 e4m3(q), c2 one float32 for 256."""
    flat = d.reshape(-1).astype(np.float32)
    mean = flat.mean(dtype=np.float64).astype(np.float32)
    padded = np.zeros(-(-flat.size // SCALES) * SCALES, np.float32)
    padded[: flat.size] = flat - mean
    groups = padded.reshape(-1, SCALES)
    c2 = np.abs(groups).max(axis=-1, keepdims=True) / np.float32(E4M3_MAX)
    q = to_e4m3(groups / np.where(c2 > 0, c2, 1))
    kept = (mean + c2 * E4M3[q]).reshape(-1)[: flat.size].reshape(d.shape)
    # A scale is a size: rounding must not turn it.
    sizes: Float32 = np.maximum(kept, 0).astype(np.float32)
    return sizes


def nf4_double(weight: Float32) -> HostTensor:
    """``weight`` (rows, K) as nf4_g64, its codes chosen for the scales that are kept."""
    grouped = into_groups(weight, "nf4_g64")
    scales = fit(grouped, "nf4_g64")
    scales = scales._replace(d=double_quantized(scales.d))
    return encode_with(grouped, scales, "nf4_g64")
