"""A model imported from ``transformers``: a ``CausalLM`` whose forward runs a graph of Pelton's ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import fx

from pelton import nn
from pelton.models.transformers_import.packed import PackedGraph


class ImportedCausalLM(nn.CausalLM):
    """Made by ``import_model``. ``graph``: placeholders as ``forward`` gives them, ``get_attr`` nodes by
    parameter or buffer name, calls, the logits."""

    origin: str = ""
    """Where the definition comes from, such as ``transformers 5.0``."""

    def __init__(
        self,
        packed: PackedGraph,
        *,
        config: Any,
        layers: Sequence[nn.LayerKV],
        saved: Mapping[str, Any],
        stored: Mapping[str, str],
    ) -> None:
        """``saved``: the tensors of the module by name, those that are one object being tied; ``stored``:
        what a checkpoint calls them."""
        super().__init__()
        self.config = config
        """As ``transformers`` has it."""
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.num_layers = len(layers)
        self.max_position_embeddings = config.max_position_embeddings
        first: dict[int, str] = {}
        for name, tensor in saved.items():
            first.setdefault(id(tensor), name)
        self.stored = dict(stored)
        """What a checkpoint calls each tensor of the module of ``transformers``."""
        self.source_shapes = {stored[first[id(t)]]: tuple(t.shape) for t in saved.values()}
        self._tied = {stored[name]: stored[first[id(t)]] for name, t in saved.items() if first[id(t)] != name}
        self._layers = tuple(layers)
        self.graph = graph = packed.graph
        for node in graph.nodes:
            if node.op == "get_attr":
                owner, _, name = str(node.target).rpartition(".")
                module = self._module(owner)
                if node.target in packed.constants:
                    module.register_buffer(name, packed.constants[node.target], persistent=False)
                    continue
                parameter = torch.nn.Parameter(node.meta["val"], requires_grad=False)
                module.register_parameter(name, parameter)
                module.given_recipes = {**module.given_recipes, name: packed.recipes[str(node.target)]}
        calls = [node for node in graph.nodes if node.op == "call_function"]
        self._calls = [(where, list(part)) for where, part in groupby(calls, key=lambda n: n.meta["where"])]
        for where, _ in self._calls:
            self._module(where)
        (self._logits,) = (node.args[0] for node in graph.nodes if node.op == "output")

    def _module(self, path: str) -> nn.Module:
        """The module at ``path`` below this one, made where it is not there yet."""
        module: Any = self
        for part in path.split(".") if path else ():
            if part not in module._modules:
                module.add_module(part, _Scope())
            module = module._modules[part]
        return module  # type: ignore[no-any-return]

    def layer_kv(self) -> Sequence[nn.LayerKV]:
        return self._layers

    def tied(self) -> dict[str, str]:
        return self._tied

    def forward(
        self,
        input_ids_T: Any,
        positions_T: Any,
        k_caches: Sequence[Any],
        v_caches: Sequence[Any],
        groups: Sequence[nn.AttentionInputs],
        logits_indices_N: Any,
    ) -> Any:
        caches = [cache for pair in zip(k_caches, v_caches, strict=True) for cache in pair]
        given = iter((input_ids_T, positions_T, logits_indices_N, *caches, *(x for g in groups for x in g)))
        values: dict[fx.Node, Any] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                owner, _, name = str(node.target).rpartition(".")
                values[node] = getattr(self.get_submodule(owner), name)
        for where, calls in self._calls:
            if where:
                self.get_submodule(where)(_run, calls, values)
            else:
                _run(calls, values)
        return values[self._logits]


class _Scope(nn.Module):
    """A module of the imported model: holds its parameters, and runs its calls under its name."""

    def forward(self, run: Any, calls: Sequence[fx.Node], values: dict[fx.Node, Any]) -> None:
        run(calls, values)


def _run(calls: Sequence[fx.Node], values: dict[fx.Node, Any]) -> None:
    for node in calls:
        values[node] = node.target(*fx.node.map_arg(node.args, values.__getitem__))  # type: ignore[operator]
