"""Hugging Face folders: config.json, one or more safetensors files, tokenizer files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pelton.errors import CheckpointError
from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.kv_quant import KVQuant
from pelton.ir.recipe import PutColumns, Recipe, Source, transpose
from pelton.ir.tensors import HostTensor
from pelton.models.checkpoint.base import Checkpoint, TensorInfo
from pelton.models.checkpoint.hf_tokenizer import HFTokenizer
from pelton.models.checkpoint.hub import folder_name
from pelton.models.checkpoint.json_file import read_json
from pelton.models.checkpoint.quantized import quantization_config, quantized_weights
from pelton.models.checkpoint.quantized.kv import kv_quant
from pelton.models.checkpoint.quantized.settings import Settings
from pelton.models.checkpoint.quantized.stored import StoredTensors
from pelton.models.checkpoint.quantized.weight import QuantizedWeight
from pelton.models.checkpoint.safetensors_file import SafetensorsFile

_NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
_INDEX = "model.safetensors.index.json"


class HFCheckpoint(Checkpoint):
    """A folder as ``save_pretrained`` writes it. Raises ``CheckpointError`` when it is not usable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = folder_name(path)
        self.config = read_json(path / "config.json")
        self._check_config()
        generation = path / "generation_config.json"
        self.generation_config = read_json(generation) if generation.exists() else {}
        self._shards = self._open_shards()
        self._stored: dict[str, tuple[SafetensorsFile, str]] = {}
        for shard in self._shards:
            for stored in shard.tensors:
                hf_name = self._canonical(stored)
                if hf_name in self._stored:
                    first = self._stored[hf_name][0].path.name
                    raise CheckpointError(
                        f"tensor {stored} of {path} is in both {first} and {shard.path.name}"
                    )
                self._stored[hf_name] = (shard, stored)
        self._read_quantization()
        self.tensors = self._tensor_infos()
        self._tokenizer = HFTokenizer(path, self.config, self.generation_config)

    def read(self, name: str) -> HostTensor:
        info = self.tensors[name]
        if name in self._orders:
            order = self._orders[name]()
            return HostTensor("int32", order.shape, order)
        if name in self._quantized:
            tensor, rounded = self._quantized[name].read()
            if rounded:
                self._rounded[name] = rounded
            return tensor
        shard, stored = self._stored[name]
        if info.quant not in _NUMPY:
            raise CheckpointError(
                f"tensor {name} of {self.name} has type {info.quant}, which is no type for weights here "
                f"(known: {', '.join(_NUMPY)})"
            )
        raw = shard.bytes_of(stored)
        data: npt.NDArray[np.generic] = raw.view(_NUMPY[info.quant]).reshape(info.shape)
        # The index may place a tensor at an odd offset; kernels expect natural alignment.
        return HostTensor(info.quant, info.shape, np.require(data, requirements="A"))

    def source(self, name: str) -> Recipe:
        weight = self._quantized.get(name)
        if weight is None:
            return Source(name)
        recipe: Recipe = Source(name)
        if weight.order is not None:
            recipe = PutColumns(recipe, Source(weight.order_name))
        # Quantisers see a Conv1D layer as a linear one: (outputs, inputs). Embeddings and head are none.
        conv = self._architecture == "GPT2LMHeadModel" and name.split(".")[-2].startswith("c_")
        return transpose(recipe) if conv else recipe

    def activation_quant(self, name: str) -> ActivationQuant | None:
        return self._quantized[name].activation if name in self._quantized else None

    def kv_quant(self) -> KVQuant | None:
        return self._kv_quant

    def read_notes(self) -> list[str]:
        if not self._rounded:
            return []
        first, worst = next(iter(self._rounded)), max(self._rounded.values())
        more = f" and {len(self._rounded) - 1} more" if len(self._rounded) > 1 else ""
        return [f"{first}{more}: scales rounded to float16, relative error up to {worst:.1e}"]

    def write_tokenizer(self, directory: Path) -> None:
        self._tokenizer.write(directory)

    def files(self) -> Iterable[Path]:
        metadata = [*self.path.glob("*.json"), *self.path.glob("*.jinja"), *self.path.glob("*.model")]
        return [*metadata, *(shard.path for shard in self._shards)]

    def _info(self, name: str) -> TensorInfo:
        shard, stored = self._stored[name]
        entry = shard.tensors[stored]
        return TensorInfo(name=name, shape=entry.shape, quant=entry.type, nbytes=entry.nbytes)

    def _canonical(self, stored: str) -> str:
        """The first GPT-2 checkpoints were saved from the inner model, without ``transformer.``."""
        if self._architecture == "GPT2LMHeadModel" and not stored.startswith(("transformer.", "lm_head.")):
            return f"transformer.{stored}"
        return stored

    @property
    def _architecture(self) -> str:
        return str(self.config["architectures"][0])

    def _check_config(self) -> None:
        architectures = self.config.get("architectures")
        if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
            raise CheckpointError(
                f"{self.path / 'config.json'} does not name its architecture (the field 'architectures')"
            )

    def _read_quantization(self) -> None:
        """What the config says is quantised, out of several stored tensors each."""
        self._quantized: dict[str, QuantizedWeight] = {}
        self._kv_quant: KVQuant | None = None
        self._kv_scales: list[str] = []
        self._rounded: dict[str, float] = {}
        self._orders: dict[str, Callable[[], npt.NDArray[Any]]] = {}
        found = quantization_config(self.path, self.config)
        if found is None:
            return
        where, values = found
        # What the tensors are to the rest of Pelton needs no such config.
        self.config.pop("quantization_config", None)
        stored = StoredTensors(str(self.path), self._stored)
        self._quantized = quantized_weights(where, values, stored)
        self._kv_quant, self._kv_scales = kv_quant(Settings(where, values), stored)
        self._orders = {w.order_name: w.order for w in self._quantized.values() if w.order is not None}
        biases = (f"{name.removesuffix('.weight')}.bias" for name in self._quantized)
        self.zero_biases = tuple(name for name in biases if name in stored)

    def _tensor_infos(self) -> dict[str, TensorInfo]:
        """Of the Hugging Face model's tensors, in the order of the files; a quantised weight is where the
        first of its parts is."""
        weight_of = {part: weight for weight in self._quantized.values() for part in weight.parts}
        infos: dict[str, TensorInfo] = {}
        for name in self._stored:
            weight = weight_of.get(name)
            if weight is None:
                if name not in self._kv_scales:
                    infos.setdefault(name, self._info(name))
            elif weight.name not in infos:
                nbytes = sum(self._info(part).nbytes for part in weight.parts)
                infos[weight.name] = TensorInfo(
                    name=weight.name, shape=weight.shape, quant=weight.quant, nbytes=nbytes, note=weight.note
                )
                if weight.order is not None:
                    order, size = weight.order_name, weight.shape[1]
                    infos[order] = TensorInfo(name=order, shape=(size,), quant="int32", nbytes=4 * size)
        return infos

    def _open_shards(self) -> list[SafetensorsFile]:
        index = self.path / _INDEX
        single = self.path / "model.safetensors"
        if single.exists():
            return [SafetensorsFile(single)]
        if index.exists():
            return self._open_indexed(index)
        others = sorted(self.path.glob("*.safetensors"))
        if len(others) == 1:
            return [SafetensorsFile(others[0])]
        raise CheckpointError(
            f"{self.path} has {len(others)} safetensors files but neither model.safetensors nor {_INDEX}"
        )

    def _open_indexed(self, index: Path) -> list[SafetensorsFile]:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            if Path(name).name != name:
                raise CheckpointError(f"{index} names a shard outside its folder: {name}")
        missing = [name for name in names if not (self.path / name).exists()]
        if missing:
            raise CheckpointError(
                f"{self.path} lacks {len(missing)} of {len(names)} shards that {_INDEX} names: "
                f"{', '.join(missing[:3])}; download them"
            )
        shards = {name: SafetensorsFile(self.path / name) for name in names}
        for tensor, name in weight_map.items():
            if tensor not in shards[name].tensors:
                raise CheckpointError(f"{index} says tensor {tensor} is in {name}, which does not have it")
        return list(shards.values())
