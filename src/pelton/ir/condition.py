"""What a pass found to hold of a checkpoint's values, and relied on: looked at again when an engine
gets other weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pelton.ir.blocks import dequantize_rows
from pelton.ir.evaluate import evaluate
from pelton.ir.recipe import Recipe
from pelton.ir.tensors import HostTensor, bf16_to_f32

#: Values compared at a time.
_CHUNK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class SameValues:
    """Two tensors of the checkpoint that differ by at most ``tolerance`` anywhere."""

    a: Recipe
    b: Recipe
    tolerance: float
    why: str
    """The pass that relied on it."""


def broken(condition: SameValues, read: Callable[[str], HostTensor]) -> str | None:
    """Why ``condition`` does not hold of the tensors that ``read`` gives; None when it does."""
    a, b = evaluate(condition.a, read), evaluate(condition.b, read)
    names = f"{', '.join(condition.a.sources())} and {', '.join(condition.b.sources())}"
    if a.shape != b.shape:
        return f"{names} have shapes {list(a.shape)} and {list(b.shape)}"
    if a.quant == b.quant and np.array_equal(a.data.view(np.uint8), b.data.view(np.uint8)):
        return None
    rows = max(1, _CHUNK // max(1, int(np.prod(a.shape[1:], dtype=np.int64))))
    for start in range(0, a.shape[0], rows):
        difference = np.abs(_values(a, start, start + rows) - _values(b, start, start + rows))
        if not (difference <= condition.tolerance).all():
            return f"{names} differ by {float(difference.max()):.2g}"
    return None


def _values(tensor: HostTensor, start: int, stop: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    part = tensor.data[start:stop]
    if not tensor.dense:
        return dequantize_rows(np.ascontiguousarray(part).view(np.uint8), tensor.quant)
    return bf16_to_f32(part) if tensor.quant == "bfloat16" else part.astype(np.float32)
