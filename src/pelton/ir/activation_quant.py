"""How a product's input is quantised, where a checkpoint or a recipe says that it is."""

from __future__ import annotations

from typing import Literal

import msgspec


class ActivationQuant(msgspec.Struct, frozen=True, omit_defaults=True):
    """The input of a linear layer as 8-bit codes with scales in float32.

    The value of a code q is ``d q``: with ``per="token"`` d = max|x| / largest over the token's row (or over
    each ``group`` columns of it), as it comes; with ``per="tensor"`` d is ``scale``, or the whole step's
    max|x| / largest where ``scale`` is 0. Largest: 127 for int8, 448 for fp8 (e4m3).
    """

    dtype: Literal["int8", "fp8"]
    per: Literal["token", "tensor"] = "token"
    group: int = 0
    """Columns that share a scale; 0: all."""
    scale: float = 0.0
    """A static scale, measured on calibration text; 0: dynamic."""
    outliers: float = 0.0
    """LLM.int8(): columns with a larger value in the step are multiplied in the network's dtype; 0: none."""

    def of_columns(self, columns: int) -> ActivationQuant:
        """As it is for rows of so many: one scale a token where ``group`` does not divide them."""
        return msgspec.structs.replace(self, group=0) if self.group and columns % self.group else self
