"""From the captured graph (one sequence, (1, T, ...)) to the packed one of the step contract.

Reordering dimensions costs nothing: a ``Value`` remembers which dimension of the packed node each
captured one is. What depends on buffers alone is computed now, and becomes a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from pelton.errors import CheckpointError
from pelton.ir.recipe import Source
from pelton.ir.verifier import VIEWS
from pelton.models.transformers_import import pack_math, pack_views  # noqa: F401  register their handlers
from pelton.models.transformers_import.capture import ROWS, TOKENS, Captured
from pelton.models.transformers_import.pack_base import HANDLERS, CannotPack
from pelton.models.transformers_import.packed import PackedGraph, Value
from pelton.nn.causal_lm import LayerKV

aten: Any = torch.ops.aten
ATTENTION = torch.ops.pelton_import.attention.default
_INPUTS = ("input_ids", "positions", "attention_mask", "logits_indices")


def layer_kv(captured: Captured) -> list[LayerKV]:
    """What each layer caches, read off its attention call."""
    layers: list[LayerKV] = []
    for node in captured.graph.nodes:
        if node.target is ATTENTION:
            k, v = (n.meta["val"] for n in node.args[1:3])
            if k.shape != v.shape:
                raise CheckpointError(
                    f"layer {len(layers)} has keys of size {k.shape[3]} and values of size {v.shape[3]}, "
                    "which Pelton's attention does not have"
                )
            layers.append(LayerKV(k.shape[1], k.shape[3], node.args[4]))
    return layers


def pack(captured: Captured, name: str, groups: Sequence[int], stored: Mapping[str, str]) -> PackedGraph:
    """The packed graph; ``groups``: KV group of each layer; ``stored``: the checkpoint's name of each
    tensor. Raises ``CheckpointError`` naming the op and the module where an op of the model ``name``
    cannot be packed."""
    return _Packing(captured, name, groups, stored).run()


class _Packing:
    def __init__(
        self, captured: Captured, name: str, groups: Sequence[int], stored: Mapping[str, str]
    ) -> None:
        self._captured, self._name, self._groups, self._stored = captured, name, groups, stored
        self._out = PackedGraph()
        self._values: dict[fx.Node, Any] = {}
        """A ``Value``, a tensor (a constant of known values), a number, or a list of such."""
        self._step: dict[str, fx.Node] = {}

    def run(self) -> PackedGraph:
        self._placeholders()
        for node in _live(self._captured.graph):
            self._out.where = (node.meta.get("custom") or {}).get("where", "")
            if node.op == "get_attr":
                self._values[node] = self._attribute(node)
            elif node.op == "call_function":
                try:
                    self._values[node] = self._call(node)
                except CannotPack as error:
                    where = self._out.where or "the model"
                    raise CheckpointError(
                        f"{self._name} cannot be imported: {node.target} in {where} {error}"
                    ) from error
            elif node.op == "output":
                self._logits(node.args[0])
        return self._out

    def _placeholders(self) -> None:
        """The step's inputs, in the order of ``ImportedCausalLM.forward``."""
        captured = [n for n in self._captured.graph.nodes if n.op == "placeholder"]
        for node, name in zip(captured, _INPUTS, strict=True):
            if name == "attention_mask":
                self._values[node] = torch.ones(())
                continue
            rows = name == "logits_indices"
            val = torch.empty(ROWS if rows else TOKENS, dtype=torch.int32, device="meta")
            self._step[name] = self._out.placeholder(name, val)
            self._values[node] = Value(self._step[name], (0,) if rows else (None, 0))
        kv = layer_kv(self._captured)
        for layer, (heads, dim, _) in enumerate(kv):
            for kind in ("k_cache", "v_cache"):
                val = torch.empty((1009, heads, 16, dim), device="meta")
                self._step[f"{kind}.{layer}"] = self._out.placeholder(f"{kind}_{layer}", val)
        for g in range(len(set(self._groups))):
            self._step[f"slot_mapping.{g}"] = self._int(f"slot_mapping_{g}", TOKENS)
            self._step[f"block_table.{g}"] = self._int(f"block_table_{g}", 1013, 7)
            self._step[f"cu_seqlens.{g}"] = self._int(f"cu_seqlens_{g}", 1014)
            self._step[f"seq_lens.{g}"] = self._int(f"seq_lens_{g}", 1013)

    def _int(self, name: str, *shape: int) -> fx.Node:
        return self._out.placeholder(name, torch.empty(shape, dtype=torch.int32, device="meta"))

    def _attribute(self, node: fx.Node) -> Any:
        target = str(node.target)
        if target in self._captured.constants:
            return self._captured.constants[target]
        if target not in self._captured.weights:
            raise CheckpointError(
                f"{self._name} uses a tensor {target} that is neither a weight nor has values"
            )
        val = node.meta["val"]
        name = self._captured.weights[target]
        weight = self._out.weight(name, val, Source(self._stored[name]))
        return Value(weight, tuple(range(val.dim())))

    def _call(self, node: fx.Node) -> Any:
        args = fx.node.map_arg(node.args, lambda n: self._values[n])
        kwargs = fx.node.map_arg(node.kwargs, lambda n: self._values[n])
        if node.target is ATTENTION:
            return self._attention(*args)
        if not _has_value((args, kwargs)):
            return _compute(node, args, kwargs)
        handler: Callable[..., Any] | None = HANDLERS.get(self._out_of_place(node))
        if handler is None:
            raise CannotPack("is not an op that the import knows")
        return handler(self._out, node.meta.get("val"), *args, **kwargs)

    def _out_of_place(self, node: fx.Node) -> Any:
        """The op of ``node`` that makes a new tensor: what the captured graph changes in place, it reads
        through the changing node from then on."""
        target = node.target
        name = getattr(target, "_opname", "")
        if not name.endswith("_") or not target._schema.is_mutable:  # type: ignore[union-attr]
            return target
        changed = node.args[0]
        later = set(list(node.graph.nodes)[list(node.graph.nodes).index(node) + 1 :])
        viewed = isinstance(changed, fx.Node) and changed.target in VIEWS
        if viewed or later & set(changed.users):  # type: ignore[union-attr]
            raise CannotPack("changes a tensor that is read elsewhere")
        return getattr(getattr(aten, name[:-1]), target._overloadname, None)  # type: ignore[union-attr]

    def _attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        scale: float,
        window: int,
        softcap: float,
        layer: int,
        sinks: Value | None,
    ) -> Value:
        """``(1, H, T, D)`` each, ``sinks`` ``(H,)`` -> ``(1, T, H, D)``."""
        pelton, step, g = torch.ops.pelton, self._step, self._groups[layer]
        q_THD, k_THD, v_THD = (self._out.arrange(x, (2, 1, 3)) for x in (q, k, v))
        caches = step[f"k_cache.{layer}"], step[f"v_cache.{layer}"]
        self._out.call(pelton.kv_write.default, k_THD, v_THD, *caches, step[f"slot_mapping.{g}"])
        rest = (step[f"{name}.{g}"] for name in ("block_table", "cu_seqlens", "seq_lens"))
        args: list[Any] = [q_THD, *caches, *rest, scale, window, softcap]
        if isinstance(sinks, torch.Tensor):
            raise CannotPack("has sinks that are no weight")
        if sinks is not None:
            args += [*[None] * 4, self._out.arrange(sinks, (0,))]
        out = self._out.call(pelton.paged_attention.default, *args)
        return Value(out, (None, 0, 1, 2))

    def _logits(self, node: Any) -> None:
        value, val = self._values[node], node.meta["val"]
        logits = self._out.arrange(value, (1, 2))
        if val.shape[1] == TOKENS:
            logits = self._out.call(torch.ops.pelton.take_rows.default, logits, self._step["logits_indices"])
        self._out.finish(logits)


def _live(graph: fx.Graph) -> list[fx.Node]:
    """Nodes that the output needs, but for placeholders, in order."""
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in live or node.target is ATTENTION:
            live.add(node)
            live.update(node.all_input_nodes)
    return [n for n in graph.nodes if n in live and n.op != "placeholder"]


def _has_value(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_has_value(v) for v in value)
    if isinstance(value, dict):
        return any(_has_value(v) for v in value.values())
    return isinstance(value, Value)


def _compute(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """The value of a node that depends on buffers alone."""
    cpu = torch.device("cpu")
    on_cpu = lambda a: cpu if isinstance(a, torch.device) else a
    args = torch.utils._pytree.tree_map(on_cpu, args)
    kwargs = torch.utils._pytree.tree_map(on_cpu, kwargs)
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor) and any(size in (TOKENS, ROWS) for size in val.shape):
        raise CannotPack("makes a tensor of the number of tokens instead of using position_ids")
    return node.target(*args, **kwargs)  # type: ignore[operator]
