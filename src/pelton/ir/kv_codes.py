"""How keys and values lie in a cache of any type: as they are, or as 8-bit codes with a scale a KV head."""

from __future__ import annotations

import torch

#: Types of 8 bits, and the largest code of each. int8: round(x / scale); float8_e4m3fn: x / scale.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def encode(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """``x``: (T, Hkv, D); ``scale``: (Hkv,) float32, None: ones -> the codes, in the cache's ``dtype``.

    Beyond the largest code a value becomes that one. Caches of more bits have no scale.
    """
    if dtype not in LARGEST:
        return x.to(dtype)
    x = x.float()
    if scale is not None:
        x = x / scale[:, None]
    x = x.clamp(-LARGEST[dtype], LARGEST[dtype])
    return (x.round() if dtype == torch.int8 else x).to(dtype)


def decode(codes: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """``codes``: (..., Hkv, D) of a cache -> float32."""
    values = codes.float()
    return values if scale is None else values * scale[:, None]


def scale_of(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales (Hkv,) for values up to ``largest`` (Hkv,) on some text; 1 where that is 0.

    With fp8, whose relative precision is the same everywhere, twice as much still fits.
    """
    room = 1.0 if dtype == torch.int8 else 2.0
    return torch.where(largest > 0, room * largest / LARGEST[dtype], 1.0).float()
