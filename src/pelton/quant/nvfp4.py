"""NVFP4's scale of a tensor, one for the projections that engines stack.

vLLM multiplies q, k and v (gate and up) as one matrix with one scale, for which it takes the smallest of
theirs: with scales of their own all but one would come out too small. Groups of 16 values keep theirs, so
little is lost where one projection's values are smaller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from pelton.ir.group_blocks import Float32
from pelton.ir.group_encoder import largest_size, nvfp4_scale

#: Modules of one parent that vLLM stacks (``packed_modules_mapping`` of its models), by Hugging Face's names.
_STACKED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def stack_of(module: str) -> str:
    """A name that the modules of a stack have in common; of others their own."""
    parent, _, own = module.rpartition(".")
    return next((f"{parent}.{'+'.join(names)}" for names in _STACKED if own in names), module)


def headers(weights: Mapping[str, Float32]) -> dict[str, Float32]:
    """The header of each weight (rows, K), by the names of their modules: one scale for those of a stack."""
    tops: dict[str, list[np.float32]] = {}
    for module, weight in weights.items():
        tops.setdefault(stack_of(module), []).append(top_of(weight))
    return {module: shared_row(tops[stack_of(module)], len(weight)) for module, weight in weights.items()}


def shared_row(tops: Iterable[np.float32], rows: int) -> Float32:
    """The header (rows, 1) of a weight whose stack's weights have these largest sizes."""
    return np.full((rows, 1), nvfp4_scale(max(tops)), np.float32)


def top_of(weight: Float32) -> np.float32:
    """max|x| of a weight (rows, K)."""
    return np.float32(largest_size(weight, -1).max())
