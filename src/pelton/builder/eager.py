"""The eager reference model with its weights streamed: layer by layer, loaded, run, freed.

So an engine can be checked against its model without ever holding the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pelton import nn
from pelton.builder.weights import convert
from pelton.engine.batch import InputBatch
from pelton.engine.config import EngineConfig
from pelton.errors import BuildError
from pelton.ir.blocks import dequantize
from pelton.ir.evaluate import evaluate
from pelton.ir.recipe import Recipe
from pelton.ir.tensors import HostTensor


class EagerReference:
    """Runs a model made on the meta device, in float32, on checkpoint weights.

    Weights are loaded when the module that holds them runs and freed after it: a decoder layer as a
    whole, every other module by itself. KV caches have ``num_blocks`` blocks of the engine's type.
    """

    def __init__(
        self,
        model: nn.CausalLM,
        recipes: Mapping[str, Recipe],
        read: Callable[[str], HostTensor],
        config: EngineConfig,
        num_blocks: int,
    ) -> None:
        self._model = model
        self._recipes = recipes
        self._read = read
        self._names = {id(p): name for name, p in model.named_parameters()}
        for module in _groups(model):
            module.register_forward_pre_hook(self._load)
            module.register_forward_hook(self._free)
        self._meta: list[tuple[torch.nn.Module, str, Any]] = []
        self._k: list[Any] = []
        self._v: list[Any] = []
        build = config.build
        assert build.block_size and build.kv_dtype
        for kv in model.layer_kv():
            shape = (num_blocks, kv.num_kv_heads, build.block_size, kv.head_dim)
            for caches in (self._k, self._v):
                caches.append(torch.full(shape, float("nan"), dtype=getattr(torch, build.kv_dtype)))

    def run(self, batch: InputBatch) -> np.ndarray[Any, np.dtype[np.float32]]:
        """One step -> logits (N, V)."""
        groups = [
            nn.AttentionInputs(
                *map(torch.from_numpy, (g.slot_mapping_T, g.block_table_BM, g.cu_seqlens, g.seq_lens_B))
            )
            for g in batch.groups
        ]
        with torch.inference_mode():
            logits = self._model(
                torch.from_numpy(batch.input_ids_T),
                torch.from_numpy(batch.positions_T),
                self._k,
                self._v,
                groups,
                torch.from_numpy(batch.logits_indices_N),
            )
        result: np.ndarray[Any, np.dtype[np.float32]] = logits.numpy()
        return result

    def _load(self, module: torch.nn.Module, _: Any) -> None:
        for owner in _owners(module):
            for name, parameter in owner._parameters.items():
                if parameter is None or not parameter.is_meta:
                    continue
                full_name = self._names[id(parameter)]
                values = torch.from_numpy(_float32(evaluate(self._recipes[full_name], self._read)))
                if values.shape != parameter.shape:
                    raise BuildError(
                        f"{full_name} has shape {tuple(values.shape)}, the model {tuple(parameter.shape)}"
                    )
                owner._parameters[name] = torch.nn.Parameter(values, requires_grad=False)
                self._meta.append((owner, name, parameter))

    def _free(self, module: torch.nn.Module, *_: Any) -> None:
        owners = set(_owners(module))
        for owner, name, parameter in self._meta:
            if owner in owners:
                owner._parameters[name] = parameter
        self._meta = [entry for entry in self._meta if entry[0] not in owners]


def _float32(tensor: HostTensor) -> npt.NDArray[np.float32]:
    """The values, with temporaries of a few MB beside the result."""
    if not tensor.dense:
        return dequantize(tensor)
    values: npt.NDArray[np.float32] = convert(tensor, "float32").data  # type: ignore[assignment]
    return values if values.flags.writeable else values.copy()


def _groups(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules whose weights are loaded together: members of module lists, and other owners."""
    layers = [m for lst in model.modules() if isinstance(lst, torch.nn.ModuleList) for m in lst]
    inside = {inner for layer in layers for inner in layer.modules()}
    others = [
        m for m in model.modules() if m not in inside and any(p is not None for p in m._parameters.values())
    ]
    return [*layers, *others]


def _owners(module: torch.nn.Module) -> list[torch.nn.Module]:
    return [m for m in module.modules() if m._parameters]
