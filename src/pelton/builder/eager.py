"""The eager reference model with its weights streamed: loaded where they are used, a piece at a time.

So an engine can be checked against its model without ever holding the model, or even its embedding table.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pelton import nn
from pelton.builder.weights import convert
from pelton.engine.batch import InputBatch
from pelton.engine.config import EngineConfig
from pelton.errors import BuildError
from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.blocks import dequantize
from pelton.ir.evaluate import evaluate
from pelton.ir.recipe import Recipe
from pelton.ir.tensors import HostTensor
from pelton.nn.module import replace_parameter
from pelton.quant.activations import rounded_activations

#: Weights multiplied at a time.
_PIECE = 1 << 21


class Reference(Protocol):
    """What an engine's logits are held to."""

    def run(self, batch: InputBatch) -> npt.NDArray[np.float32]:
        """One step -> logits (N, V)."""
        ...


class EagerReference:
    """Runs a model made on the meta device, in float32, on checkpoint weights.

    KV caches have ``num_blocks`` blocks of the engine's type. ``hold``: keep the dequantised weights, for
    many steps. ``activations``: how inputs of linear layers are rounded, by the name of the weight.
    """

    def __init__(
        self,
        model: nn.CausalLM,
        recipes: Mapping[str, Recipe],
        read: Callable[[str], HostTensor],
        config: EngineConfig,
        num_blocks: int,
        *,
        hold: bool = False,
        activations: Mapping[str, ActivationQuant] = MappingProxyType({}),
    ) -> None:
        self._model = model
        if hold:
            _load(model, recipes, read)
        else:
            StreamedWeights(model, recipes, read)
        for name, quant in activations.items():
            module = model.get_submodule(name.removesuffix(".weight"))
            module.register_forward_pre_hook(partial(round_input, quant))
        self.k_caches: list[Any] = []
        self.v_caches: list[Any] = []
        build = config.build
        assert build.block_size and build.kv_dtype
        for kv in model.layer_kv():
            shape = (num_blocks, kv.num_kv_heads, build.block_size, kv.head_dim)
            for caches in (self.k_caches, self.v_caches):
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
                self.k_caches,
                self.v_caches,
                groups,
                torch.from_numpy(batch.logits_indices_N),
            )
        result: np.ndarray[Any, np.dtype[np.float32]] = logits.numpy()
        return result


def round_input(quant: ActivationQuant, _: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """A hook before a module that quantises its input."""
    return (torch.from_numpy(rounded_activations(arguments[0].numpy(), quant)),)


def _load(model: nn.CausalLM, recipes: Mapping[str, Recipe], read: Callable[[str], HostTensor]) -> None:
    for name, parameter in list(model.named_parameters()):
        values = torch.from_numpy(dequantize(evaluate(recipes[name], read)))
        replace_parameter(model, parameter, torch.nn.Parameter(values, requires_grad=False))


class StreamedWeights:
    """Lets a module that was made on the meta device run in float32 without ever holding its weights.

    Projections are computed some rows at a time, of a table the rows of the tokens are read, and other
    modules' own weights are loaded when they run and freed after it. Modules in ``skip`` are left alone.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        recipes: Mapping[str, Recipe],
        read: Callable[[str], HostTensor],
        skip: Container[torch.nn.Module] = (),
    ) -> None:
        self._recipes = recipes
        self._read = read
        tensors = (*model.named_parameters(), *model.named_buffers())
        self._names = {id(tensor): name for name, tensor in tensors if tensor.is_meta}
        for module in model.modules():
            if module in skip:
                continue
            if type(module).forward in (nn.Linear.forward, torch.nn.Linear.forward):
                module.forward = partial(self._linear, module)
            elif type(module).forward in (nn.Embedding.forward, torch.nn.Embedding.forward):
                module.forward = partial(self._embedding, module)
            elif any(self._missing(module)):
                module.register_forward_pre_hook(self._load)
                module.register_forward_hook(self._free)
        self._meta: dict[torch.nn.Module, list[tuple[dict[str, Any], str, Any]]] = {}

    def _missing(self, module: torch.nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
        """(table, name, tensor) of the module's own tensors that have no values."""
        tables = (module._parameters, module._buffers)
        return [(own, n, t) for own in tables for n, t in own.items() if t is not None and t.is_meta]

    def _evaluate(self, parameter: Any) -> HostTensor:
        """The parameter's values as the checkpoint has them: a view of the file where possible."""
        name = self._names[id(parameter)]
        tensor = evaluate(self._recipes[name], self._read)
        if tensor.shape != tuple(parameter.shape):
            raise BuildError(f"{name} has shape {tensor.shape}, the model {tuple(parameter.shape)}")
        return tensor

    def _values(self, parameter: Any) -> Any:
        return torch.from_numpy(_float32(self._evaluate(parameter)))

    def _linear(self, module: Any, x: Any) -> Any:
        weight = self._evaluate(module.weight)
        bias = None if module.bias is None else self._values(module.bias)
        step = max(1, _PIECE // module.in_features)
        parts = []
        for start in range(0, module.out_features, step):
            rows = slice(start, start + step)
            piece = torch.from_numpy(_float32(_rows(weight, rows)))
            parts.append(torch.nn.functional.linear(x, piece, None if bias is None else bias[rows]))
        return torch.cat(parts, dim=-1)

    def _embedding(self, module: Any, ids: Any) -> Any:
        wanted, places = np.unique(ids.numpy(), return_inverse=True)
        table = torch.from_numpy(_float32(_rows(self._evaluate(module.weight), wanted)))
        return table[torch.from_numpy(places.reshape(ids.shape))]

    def _load(self, module: torch.nn.Module, _: Any) -> None:
        self._meta[module] = self._missing(module)
        for own, name, tensor in self._meta[module]:
            values = self._values(tensor)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            own[name] = torch.nn.Parameter(values, requires_grad=False) if is_parameter else values

    def _free(self, module: torch.nn.Module, *_: Any) -> None:
        for own, name, tensor in self._meta.pop(module):
            own[name] = tensor


def _rows(tensor: HostTensor, which: Any) -> HostTensor:
    data = tensor.data[which]
    return HostTensor(tensor.quant, (len(data), *tensor.shape[1:]), data)


def _float32(tensor: HostTensor) -> npt.NDArray[np.float32]:
    """The values, with temporaries of a few MB beside the result."""
    if not tensor.dense:
        return dequantize(tensor)
    values: npt.NDArray[np.float32] = convert(tensor, "float32").data  # type: ignore[assignment]
    return values if values.flags.writeable else values.copy()
