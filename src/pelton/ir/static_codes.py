"""Inputs of products as 8-bit codes with one static scale: what such a rounding is worth, on torch tensors.

Products say it by two attributes, ``x_scale`` (the scale d) and ``x_codes`` (int8 or fp8): the value of a
code q is d q, and what is out of reach has the last code. Where the input has the codes' own type, it is q
already: what made it has ``y_scale`` and ``y_codes``, by which its result is rounded and left as codes.
"""

from __future__ import annotations

import torch

#: Largest code by type.
LARGEST = {"int8": 127.0, "fp8": 448.0}
DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def to_codes(x: torch.Tensor, scale: float, codes: str) -> torch.Tensor:
    """``x`` as codes, int8 or float8_e4m3fn."""
    top = LARGEST[codes]
    ratio = x.float() / torch.tensor(scale, dtype=torch.float32)
    ratio = (torch.round(ratio) if codes == "int8" else ratio).clamp(-top, top)
    return ratio.to(DTYPES[codes])


def scale_of(x: torch.Tensor, codes: str) -> float:
    """The scale with which every value of ``x`` is in reach."""
    return float(x.abs().max()) / LARGEST[codes]


#: Of the ops' samples: tokens, and the types of weights whose inputs may be codes of a type.
STATIC_SAMPLES = tuple(
    (tokens, quant) for tokens in (5, 40) for quant in (("fp8_row", "fp8"), ("int8_row", "int8"))
)


def rounded(x: torch.Tensor, scale: float | None, codes: str | None) -> torch.Tensor:
    """``x`` as a product sees it: without a scale as it is, else d q in float32."""
    if scale is None or codes is None:
        return x
    q = x if x.dtype == DTYPES[codes] else to_codes(x, scale, codes)
    return q.float() * torch.tensor(scale, dtype=torch.float32)


def left(y: torch.Tensor, scale: float | None, codes: str | None) -> torch.Tensor:
    """A result as it is left: with a scale as codes."""
    return y if scale is None or codes is None else to_codes(y, scale, codes)


def result_dtype(x: torch.Tensor, codes: str | None) -> torch.dtype:
    """Of a result that is of the type of ``x``, or codes."""
    return x.dtype if codes is None else DTYPES[codes]
