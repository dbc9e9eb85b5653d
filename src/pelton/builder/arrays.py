"""Named arrays as a checkpoint: weights that a program has in memory, such as a trainer's. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pelton.errors import CheckpointError
from pelton.ir.tensors import HostTensor
from pelton.models.checkpoint import Checkpoint, TensorInfo

_DENSE = ("float32", "float16", "bfloat16")


class ArrayCheckpoint(Checkpoint):
    """``arrays`` by Hugging Face tensor name: numpy arrays (bfloat16 of ml_dtypes too) or torch tensors of
    float32, float16 or bfloat16. ``config``: of the model they belong to.

    Raises ``CheckpointError`` for a value of another kind.
    """

    def __init__(self, arrays: Mapping[str, Any], config: Mapping[str, Any], name: str) -> None:
        self.name = name
        self.path = Path(name)
        self.config = dict(config)
        self.generation_config = {}
        self._tensors = {key: _host(key, value) for key, value in arrays.items()}
        self.tensors = {
            key: TensorInfo(name=key, shape=t.shape, quant=t.quant, nbytes=t.nbytes)
            for key, t in self._tensors.items()
        }

    def read(self, name: str) -> HostTensor:
        """The array called ``name``."""
        return self._tensors[name]

    def write_tokenizer(self, directory: Path) -> None:
        """Arrays have none."""
        raise CheckpointError(f"{self.name} has no tokenizer")

    def files(self) -> Iterable[Path]:
        """None: it is in memory."""
        return ()


def _host(name: str, value: Any) -> HostTensor:
    kind = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")
    if kind not in _DENSE:
        raise CheckpointError(f"{name} is {kind}; give an array of {', '.join(_DENSE)}")
    if hasattr(value, "detach"):  # a torch tensor
        value = value.detach().cpu().contiguous()
        if kind == "bfloat16":
            import torch

            value = value.view(torch.int16)
        value = value.numpy()
    data = np.ascontiguousarray(value)
    if kind == "bfloat16":
        data = data.view(np.uint16)
    return HostTensor(kind, tuple(data.shape), data)
