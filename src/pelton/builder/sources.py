"""From the Hugging Face tensors that a model names to what a checkpoint's file holds. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pelton.dtypes import BLOCK_TYPES, is_dense
from pelton.ir.recipe import Recipe
from pelton.models.checkpoint import Checkpoint, TensorInfo


def readable(checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    """The checkpoint's tensors with the type that ``Checkpoint.read`` gives."""
    return {n: replace(info, quant=_read_quant(info.quant)) for n, info in checkpoint.tensors.items()}


def _read_quant(quant: str) -> str:
    """Block types that Pelton does not have come dequantised."""
    return quant if is_dense(quant) or quant in BLOCK_TYPES else "float32"


def resolve_sources(recipe: Recipe, source: Callable[[str], Recipe]) -> Recipe:
    """``recipe`` with every Hugging Face tensor replaced by how the checkpoint makes it.

    What a model does and a file format undoes folds away exactly.
    """
    return recipe.resolve(source)
