"""A model imported from ``transformers``: a ``CausalLM`` whose forward runs a graph of Pelton's ops."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import fx

from pelton import nn
from pelton.ir.recipe import Concat, Recipe
from pelton.models.transformers_import.packed import PackedGraph

aten: Any = torch.ops.aten
LINEAR: Any = torch.ops.pelton.linear.default


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

    def linear_groups(self) -> list[tuple[str, ...]]:
        by_input: dict[Any, list[fx.Node]] = {}
        for node in self.graph.nodes:
            if node.target is LINEAR and all(len(p.users) == 1 for p in node.all_input_nodes[1:]):
                parent = node.meta["where"].rpartition(".")[0]
                by_input.setdefault((node.args[0], parent, node.args[2] is None), []).append(node)
        groups = [sorted(group, key=_is_gated) for group in by_input.values() if len(group) > 1]
        return [tuple(str(node.args[1].target) for node in group) for group in groups]  # type: ignore[union-attr]

    def stack_linears(self, weights: Sequence[str]) -> None:
        """The first stands for all of them; the others read parts of its result."""
        order = {str(n.args[1].target): n for n in self.graph.nodes if n.target is LINEAR}  # type: ignore[union-attr]
        linears = [order[name] for name in weights]
        parent = linears[0].meta["where"].rpartition(".")[0]
        where = f"{parent}.{'_'.join(n.meta['where'].rpartition('.')[2] for n in linears)}".lstrip(".")
        first = next(n for n in self.graph.nodes if n in linears)
        arguments: list[Any] = [first.args[0]]
        for index, kind in ((1, "weight"), (2, "bias")):
            parts = [n.args[index] for n in linears]
            arguments.append(None if parts[0] is None else self._stacked(parts, f"{where}.{kind}"))
        sizes = [n.meta["val"].shape[1] for n in linears]
        rows = first.meta["val"].shape[0]
        with self.graph.inserting_before(first):
            product = self.graph.call_function(LINEAR, tuple(arguments))
            product.meta = {"val": torch.empty((rows, sum(sizes)), device="meta"), "where": where}
            split = self.graph.call_function(aten.split_with_sizes.default, (product, sizes, 1))
            split.meta = {"val": product.meta["val"].split(sizes, 1), "where": where}
            for i, linear in enumerate(linears):
                part = self.graph.call_function(operator.getitem, (split, i))
                part.meta = {"val": split.meta["val"][i], "where": where}
                linear.replace_all_uses_with(part)
        for linear in linears:
            own = linear.all_input_nodes[1:]
            self.graph.erase_node(linear)
            for node in own:
                self._forget(node)
        self._index()

    def _stacked(self, parts: Sequence[fx.Node], name: str) -> fx.Node:
        val = parts[0].meta["val"]
        shape = (sum(p.meta["val"].shape[0] for p in parts), *val.shape[1:])
        recipes = tuple(self._recipe(str(p.target)) for p in parts)
        self._register(name, torch.empty(shape, device="meta"), Concat(recipes))
        with self.graph.inserting_before(parts[0]):
            node = self.graph.create_node("get_attr", name)
        node.meta = {"val": torch.empty(shape, device="meta"), "where": ""}
        return node

    def _recipe(self, name: str) -> Recipe:
        owner, _, own = name.rpartition(".")
        return self._module(owner).given_recipes[own]

    def _register(self, name: str, value: Any, recipe: Recipe) -> None:
        owner, _, own = name.rpartition(".")
        module = self._module(owner)
        module.register_parameter(own, torch.nn.Parameter(value, requires_grad=False))
        module.given_recipes = {**module.given_recipes, own: recipe}

    def _forget(self, node: fx.Node) -> None:
        """Drop a weight that nobody reads any more."""
        owner, _, own = str(node.target).rpartition(".")
        module = self._module(owner)
        del module._parameters[own]
        module.given_recipes = {k: v for k, v in module.given_recipes.items() if k != own}
        self.graph.erase_node(node)

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


def _is_gated(linear: fx.Node) -> int:
    """Order of stacked layers: of a gated MLP the gate goes first."""
    users = list(linear.users)
    gated = len(users) == 1 and users[0].target is torch.ops.pelton.gated_activation.default
    return int(gated and users[0].args[0] is not linear)
