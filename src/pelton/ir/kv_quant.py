"""How a checkpoint quantises its KV cache."""

from __future__ import annotations

from typing import Literal

import msgspec

#: Element type of caches of a ``KVQuant.dtype``.
CACHE_DTYPE = {"fp8": "float8_e4m3fn", "int8": "int8"}


class KVQuant(msgspec.Struct, frozen=True):
    """Keys and values as 8-bit codes: the value of a code q is ``scale q``, fp8 codes are e4m3.

    Scales are measured on calibration text, of each layer one, or one for each key/value head; no scales:
    they are made as the values come.
    """

    dtype: Literal["int8", "fp8"]
    k_scales: tuple[tuple[float, ...], ...] = ()
    v_scales: tuple[tuple[float, ...], ...] = ()
