"""GGUF checkpoints seen as Hugging Face ones: names, config keys and row order translated.

Block-quantised tensors stay blocks. llama.cpp permutes the rows of q and k projections of
``llama`` files; ``read`` undoes that on block rows, so the bits of every block are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pelton.dtypes import GGUF_BLOCK_TYPES
from pelton.errors import CheckpointError, MissingDependencyError
from pelton.ir.evaluate import permute_rows
from pelton.ir.recipe import AddScalar, Recipe, Source, Transpose
from pelton.ir.tensors import HostTensor, bf16_to_f32
from pelton.models.checkpoint.base import Checkpoint, TensorInfo
from pelton.models.checkpoint.gguf_config import Metadata, config_from_metadata
from pelton.models.checkpoint.gguf_file import GGUFFile, GGUFTensor
from pelton.models.checkpoint.gguf_names import NAME_MAPS
from pelton.models.checkpoint.tokenizer_from_gguf import GGUFTokenizer

_NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


class GGUFCheckpoint(Checkpoint):
    """A ``.gguf`` file. Raises ``CheckpointError`` when it is not one that Pelton can build from."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GGUFFile(path)
        metadata = self._file.metadata
        self.arch = self._architecture()
        self._names = NAME_MAPS[self.arch]
        self._stored: dict[str, GGUFTensor] = {}
        self.tensors = self._translate_names()
        # Not general.name: files of one model in different types share it, or it is a training run's.
        self.name = path.stem
        if "token_embd.weight" not in self._file.tensors:
            raise CheckpointError(f"{path} has no token_embd.weight: it is not a language model")
        factors = {
            name: self._float32(tensor)
            for name, tensor in self._file.tensors.items()
            if name.startswith("rope_")
        }
        shapes = {name: tensor.shape for name, tensor in self._file.tensors.items()}
        self.config = config_from_metadata(Metadata(str(path), self.arch, metadata), shapes, factors)
        self._check_heads()
        self._tokenizer = GGUFTokenizer(path, self.arch, metadata)
        self.generation_config = self._tokenizer.generation_config()
        self.config |= self.generation_config

    def read(self, name: str) -> HostTensor:
        info, stored = self.tensors[name], self._stored[name]
        if stored.type in GGUF_BLOCK_TYPES:
            block = GGUF_BLOCK_TYPES[stored.type]
            data: npt.NDArray[np.generic] = self._file.bytes_of(stored).reshape(
                stored.shape[0], stored.shape[1] // block.block_size * block.block_bytes
            )
            quant = stored.type
        elif stored.type in _NUMPY:
            data = self._file.bytes_of(stored).view(_NUMPY[stored.type]).reshape(stored.shape)
            quant = stored.type
        else:
            data, quant = self._dequantized(stored), "float32"
        if self._names.part(stored.name) in self._names.permuted:
            data = permute_rows(data, self._heads(stored.name), inner=2)
        return HostTensor(quant, info.shape, data)

    def source(self, name: str) -> Recipe:
        stored = self._stored[name]
        if self._names.plus_one and "norm" in stored.name:
            return AddScalar(Source(name), -1.0)
        if self._names.part(stored.name) in self._names.transposed and name.endswith(".weight"):
            return Transpose(Source(name))
        return Source(name)

    def write_tokenizer(self, directory: Path) -> None:
        self._tokenizer.write(directory)

    def files(self) -> Iterable[Path]:
        return [self.path]

    def _architecture(self) -> str:
        metadata = self._file.metadata
        if metadata.get("split.count", 1) > 1:
            raise CheckpointError(
                f"{self.path} is one of {metadata['split.count']} shards of a split GGUF file; "
                f"join them first: llama-gguf-split --merge FIRST_SHARD OUTPUT"
            )
        arch = metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise CheckpointError(f"{self.path} does not say its architecture (general.architecture)")
        if arch not in NAME_MAPS:
            raise CheckpointError(
                f"{self.path} has architecture {arch!r}, which Pelton does not support "
                f"(supported: {', '.join(sorted(NAME_MAPS))})"
            )
        return arch

    def _translate_names(self) -> dict[str, TensorInfo]:
        infos = {}
        unknown = []
        for tensor in self._file.tensors.values():
            try:
                name = self._names.to_hf(tensor.name)
            except KeyError:
                unknown.append(tensor.name)
                continue
            if name is None:
                continue
            self._check_type(tensor)
            note = ""
            if tensor.type not in GGUF_BLOCK_TYPES and tensor.type not in _NUMPY:
                note = f"{tensor.type} has no Pelton block type: read as float32"
            infos[name] = TensorInfo(
                name=name, shape=tensor.shape, quant=tensor.type, nbytes=tensor.nbytes, note=note
            )
            self._stored[name] = tensor
        if unknown:
            raise CheckpointError(
                f"{self.path} has {len(unknown)} tensors that a {self.arch} model does not have: "
                f"{', '.join(unknown[:3])}{', ...' if len(unknown) > 3 else ''}"
            )
        return infos

    def _check_type(self, tensor: GGUFTensor) -> None:
        if tensor.type in GGUF_BLOCK_TYPES and len(tensor.shape) != 2:
            raise CheckpointError(
                f"{self.path}: tensor {tensor.name} has {len(tensor.shape)} dimensions of {tensor.type} "
                f"blocks; only matrices can be quantised"
            )
        if re.fullmatch(r"int\d+|i\d+|f64", tensor.type):
            raise CheckpointError(
                f"{self.path}: tensor {tensor.name} has type {tensor.type}, which is no type for weights"
            )

    def _check_heads(self) -> None:
        """Rows that ``read`` permutes must divide into the heads that the metadata states."""
        for tensor in self._stored.values():
            if self._names.part(tensor.name) in self._names.permuted:
                heads = self._heads(tensor.name)
                if tensor.shape[0] % (2 * heads):
                    raise CheckpointError(
                        f"{self.path} is damaged: the {tensor.shape[0]} rows of {tensor.name} do not divide "
                        f"into {heads} heads"
                    )

    def _heads(self, name: str) -> int:
        key = "num_attention_heads" if ".attn_q." in name else "num_key_value_heads"
        return int(self.config[key])

    def _float32(self, tensor: GGUFTensor) -> npt.NDArray[np.float32]:
        """The values of a small dense tensor."""
        raw = self._file.bytes_of(tensor)
        if tensor.type not in _NUMPY:
            raise CheckpointError(f"{self.path}: tensor {tensor.name} has type {tensor.type}, not a float")
        if tensor.type == "bfloat16":
            return bf16_to_f32(raw.view(np.uint16))
        return raw.view(_NUMPY[tensor.type]).astype(np.float32)

    def _dequantized(self, tensor: GGUFTensor) -> npt.NDArray[np.generic]:
        try:
            from gguf.constants import GGMLQuantizationType
            from gguf.quants import dequantize
        except ImportError as error:
            raise MissingDependencyError(
                f"tensor {tensor.name} of {self.path} is {tensor.type}, which needs the gguf library: "
                f"pip install 'pelton[build]'"
            ) from error
        raw = self._file.bytes_of(tensor)
        rows = raw.reshape(*tensor.shape[:-1], raw.size // (int(np.prod(tensor.shape[:-1])) or 1))
        try:
            values: Any = dequantize(rows, GGMLQuantizationType(tensor.type_number))
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: tensor {tensor.name} is {tensor.type}, which the gguf library cannot decode"
            ) from error
        return np.asarray(values, np.float32).reshape(tensor.shape)
