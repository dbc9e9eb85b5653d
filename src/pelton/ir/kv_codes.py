"""How keys and values lie in a cache of any type: as they are, or as 8-bit codes with a scale a KV head."""

from __future__ import annotations

import torch

#: Types of 8 bits, and the largest code of each. int8: round(x / scale); float8_e4m3fn: x / scale.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def encode(
    x: torch.Tensor,
    dtype: torch.dtype,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None = None,
    queries: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x``: (T, Hkv, D); ``scale``: (Hkv,) float32, None: ones -> the codes, in the cache's ``dtype``.

    Beyond the largest code a value becomes that one. Caches of more bits have no scale. ``shift``: (Hkv, D)
    float32, taken from ``x`` first; ``queries``: as in ``look_again``.
    """
    if shift is not None:
        x = x.float() - shift
    if dtype not in LARGEST:
        return x.to(dtype)
    x = x.float()
    if scale is not None:
        x = x / scale[:, None]
    x = x.clamp(-LARGEST[dtype], LARGEST[dtype])
    codes = x.round() if dtype == torch.int8 else x.to(dtype).float()
    if queries is not None:
        codes = look_again(x, codes, dtype, queries)
    return codes.to(dtype)


def look_again(
    x: torch.Tensor, codes: torch.Tensor, dtype: torch.dtype, queries: torch.Tensor
) -> torch.Tensor:
    """``x`` (T, Hkv, D) rounded to the nearest ``codes``, with one of a key's D codes rounded to its other
    neighbour where that brings its scores nearer to what they are.

    ``queries`` (Hkv, 2 D), u and then r: queries q have about E[q q^T] = u u^T + diag(r), so errors e of a
    key change its scores by (e.u)^2 + sum of r e^2 in the mean of squares. Most queries of a head lie much
    the same way: the first term is often the larger one, and one code can take most of it back.
    """
    along, apart = queries.chunk(2, dim=1)
    error = codes - x
    other = codes - error.sign() * _step(codes, dtype)
    move = other - codes
    score = (error * along).sum(-1, keepdim=True)
    change = move * along * (2 * score + move * along) + move * (2 * error + move) * apart
    change = torch.where(other.abs() <= LARGEST[dtype], change, torch.inf)
    best = change.amin(-1, keepdim=True)
    return torch.where((change == best) & (change < 0), other, codes)


def _step(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To the next larger code: of fp8, an eighth of the power of two below, at least 2^-9."""
    if dtype == torch.int8:
        return torch.ones_like(codes)
    return torch.exp2(torch.frexp(codes.abs().clamp(min=2.0**-6))[1] - 4.0)


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
