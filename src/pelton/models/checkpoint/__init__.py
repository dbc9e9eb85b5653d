"""Checkpoint readers: ``open_checkpoint`` gives the Hugging Face view of a folder or GGUF file."""

from pelton.models.checkpoint.base import (
    Checkpoint,
    TensorInfo,
    assert_finite,
    check_tensors,
    count_non_finite,
)
from pelton.models.checkpoint.open import open_checkpoint

__all__ = [
    "Checkpoint",
    "TensorInfo",
    "assert_finite",
    "check_tensors",
    "count_non_finite",
    "open_checkpoint",
]
