"""How keys and values lie in a cache of any type: as they are, or as 8-bit codes with a scale a KV head."""

from __future__ import annotations

import torch

#: Types of 8 bits, and the largest code of each. int8: round(x / scale); float8_e4m3fn: x / scale.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def encode(
    x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None, shift: torch.Tensor | None = None
) -> torch.Tensor:
    """``x``: (T, Hkv, D); ``scale``: (Hkv,) float32, None: ones -> the codes, in the cache's ``dtype``.

    Beyond the largest code a value becomes that one. Caches of more bits have no scale. ``shift``: (Hkv, D)
    float32, taken from ``x`` first.
    """
    if shift is not None:
        x = x.float() - shift
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


#: Of the range of int8 codes, the shares of the largest value that are tried.
_SHARES = [i / 20 for i in range(1, 21)]


def scale_of(values: torch.Tensor, dtype: torch.dtype, *, relative: bool = False) -> torch.Tensor:
    """Scales (Hkv,) for ``values`` (Hkv, tokens, D) that some text gave; 1 where all are 0.

    int8: the scale of least squared error, as a few values far out (those of the first token, often) would
    make the steps of all others coarse. ``relative``: the error of each token over that token's squares,
    which is what values need: the tokens that attention looks at most, such as the first, often have small
    ones. With fp8, whose relative precision is the same everywhere, twice the largest value still fits.
    """
    values = values.float()
    largest = values.abs().amax(dim=(1, 2))
    scale = torch.where(largest > 0, largest / LARGEST[dtype], 1.0)
    if dtype != torch.int8:
        return torch.where(largest > 0, 2 * scale, 1.0)
    weights = torch.ones_like(values[..., 0])
    if relative:
        squares = values.square().sum(dim=2)
        weights = torch.where(squares > 0, 1 / squares, 0.0)
    best, least = scale, torch.full_like(scale, float("inf"))
    for share in _SHARES:
        tried = scale * share
        codes = (values / tried[:, None, None]).round().clamp(-LARGEST[dtype], LARGEST[dtype])
        error = (codes * tried[:, None, None] - values).square().sum(dim=2).mul(weights).sum(dim=1)
        best, least = torch.where(error < least, tried, best), torch.minimum(error, least)
    return torch.where(largest > 0, best, 1.0)
