"""A model imported from ``transformers``: a ``CausalLM`` whose forward runs a graph of Pelton's ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import fx

from pelton import nn
from pelton.ir.recipe import Recipe
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
        self.graph = packed.graph
        for node in self.graph.nodes:
            if node.op == "get_attr" and node.target in packed.constants:
                owner, _, name = str(node.target).rpartition(".")
                self._module(owner).register_buffer(name, packed.constants[node.target], persistent=False)
            elif node.op == "get_attr":
                self._register(str(node.target), node.meta["val"], packed.recipes[str(node.target)])
        self._index()

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
        given = (input_ids_T, positions_T, logits_indices_N, *caches, *(x for g in groups for x in g))
        values: dict[fx.Node, Any] = dict(zip(self._placeholders, given, strict=True))
        for scopes, calls in self._parts:
            self._run(scopes, calls, values)
        return values[self._logits]

    def _run(self, scopes: Sequence[str], calls: Sequence[fx.Node], values: dict[fx.Node, Any]) -> Any:
        """Run ``calls`` inside the modules ``scopes``: that of the calls, and those that own weights.
        Returns what the last call does."""
        if scopes:
            return self.get_submodule(scopes[0])(self._run, scopes[1:], calls, values)
        result = None

        def value(node: fx.Node) -> Any:
            return self._attribute(str(node.target)) if node.op == "get_attr" else values[node]

        for node in calls:
            values[node] = result = node.target(*fx.node.map_arg(node.args, value))  # type: ignore[operator]
            for last in self._read_last[node]:
                del values[last]
        return result

    def _register(self, name: str, value: Any, recipe: Recipe) -> None:
        owner, _, own = name.rpartition(".")
        module = self._module(owner)
        module.register_parameter(own, torch.nn.Parameter(value, requires_grad=False))
        module.given_recipes = {**module.given_recipes, own: recipe}

    def _attribute(self, name: str) -> Any:
        owner, _, own = name.rpartition(".")
        return getattr(self.get_submodule(owner), own)

    def _module(self, path: str) -> nn.Module:
        """The module at ``path`` below this one, made where it is not there yet."""
        module: Any = self
        for part in path.split(".") if path else ():
            if part not in module._modules:
                module.add_module(part, _Scope())
            module = module._modules[part]
        return module  # type: ignore[no-any-return]

    def _index(self) -> None:
        """What ``forward`` needs to know of the graph."""
        nodes = list(self.graph.nodes)
        self._placeholders = [n for n in nodes if n.op == "placeholder"]
        (self._logits,) = (n.args[0] for n in nodes if n.op == "output")
        calls = [n for n in nodes if n.op == "call_function"]
        self._parts = [(scopes, list(part)) for scopes, part in groupby(calls, key=_scopes)]
        for scopes, _ in self._parts:
            for scope in scopes:
                self._module(scope)
        last = {source: node for node in calls for source in node.all_input_nodes}
        self._read_last: dict[fx.Node, list[fx.Node]] = {node: [] for node in calls}
        for source, node in last.items():
            if source.op == "call_function" and source is not self._logits:
                self._read_last[node].append(source)


class _Scope(nn.Module):
    """A module of the imported model: holds its parameters, and runs its calls under its name."""

    def forward(self, run: Any, *arguments: Any) -> Any:
        return run(*arguments)


def _scopes(node: fx.Node) -> tuple[str, ...]:
    """Modules to run a call in: those whose weights it reads, then the one that it belongs to."""
    owners = {str(n.target).rpartition(".")[0] for n in node.all_input_nodes if n.op == "get_attr"}
    where = node.meta["where"]
    return tuple(scope for scope in (*sorted(owners - {where, ""}), where) if scope)
