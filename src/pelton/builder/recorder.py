"""Records what a model's ``forward`` calls on meta tensors, as a ``torch.fx`` graph.

A dispatch mode sees every op below autograd, in the order of execution, effects in their places:
nothing is functionalised, and no symbolic shapes are computed. Meta tensors of a view share the
storage of what they view, so aliasing is recorded for free.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from pelton.ir.aten import COMPUTE, RULES, make_dense, needs_dense
from pelton.ir.graph import meta_call
from pelton.ir.op import op_of_target
from pelton.ir.verifier import VIEWS

aten: Any = torch.ops.aten

#: Ops whose result is a Python value: what ``.item()``, ``int(x)``, ``if x > 0`` and ``==`` come down to.
_READS_VALUES = frozenset(
    {aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default, aten.equal.default}
)


class Untraceable(Exception):
    """What ``forward`` did that a graph cannot hold, as the end of a sentence."""


class Recorder(TorchDispatchMode):
    """Inside ``with recorder:`` every op called on known tensors becomes a node of ``graph``.

    Use it inside ``torch.inference_mode``: elsewhere autograd wraps results into new tensors, and a
    tensor is known by its identity.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True, the default, imports the whole compiler at the first op (1.5 s) to keep out of its way.
        return False

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self._path = [""]
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[Any] = []
        """Every known tensor, so that identities are not reused."""

    def placeholder(self, name: str, tensor: Any) -> fx.Node:
        """A graph input that stands for ``tensor``; ``name`` may hold dots."""
        node = self.graph.create_node("placeholder", name.replace(".", "_"), name=name.replace(".", "_"))
        return self._know(node, tensor)

    @contextmanager
    def modules_of(self, model: torch.nn.Module) -> Iterator[None]:
        """Within, nodes remember the submodule of ``model`` that runs."""

        def leave(*_: Any) -> None:
            self._path.pop()

        handles: list[Any] = []
        for name, module in model.named_modules():
            enter = lambda *_, name=name: self._path.append(name)
            handles += (module.register_forward_pre_hook(enter), module.register_forward_hook(leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def result(self, value: Any) -> None:
        """End the graph: ``value`` is what ``forward`` returned."""
        if not isinstance(value, torch.Tensor):
            raise Untraceable(f"forward returns a {type(value).__name__} instead of one tensor of logits")
        # A tuple, so that a graph may return more than the logits.
        self.graph.output((self._node_of(value),))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READS_VALUES:
            raise Untraceable(f"{self._here()} reads the value of a tensor ({func}), which is not known yet")
        if func in RULES:
            with self:
                result = RULES[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        if op_of_target(func) is None and func not in VIEWS and func not in COMPUTE:
            # Without autograd's keys a composite op arrives whole; its parts are what the graph wants.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if needs_dense(func):
            with self:
                args, kwargs = tree_map(make_dense, (args, kwargs))
        node_args, node_kwargs = self._nodes_in(args, func), self._nodes_in(kwargs, func)
        result = meta_call(func, args, kwargs)
        node = self.graph.create_node(
            "call_function", func, node_args, node_kwargs, name=func._schema.name.split("::")[1]
        )
        self._know(node, result)
        if isinstance(result, list | tuple):
            for i, part in enumerate(result):
                self._know(self.graph.call_function(operator.getitem, (node, i)), part)
        return result

    def _know(self, node: fx.Node, value: Any) -> fx.Node:
        node.meta = {"val": value, "where": self._path[-1]}
        if isinstance(value, torch.Tensor):
            self._nodes[id(value)] = node
        self._alive.append(value)
        return node

    def _nodes_in(self, value: Any, func: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._node_of(value)
        if isinstance(value, list | tuple):
            return type(value)(self._nodes_in(v, func) for v in value)
        if isinstance(value, dict):
            return {k: self._nodes_in(v, func) for k, v in value.items()}
        return value

    def _node_of(self, tensor: Any) -> fx.Node:
        if id(tensor) not in self._nodes:
            raise Untraceable(
                f"{self._here()} uses a tensor of shape {tuple(tensor.shape)} that is neither an input nor a "
                "parameter; make it a parameter, or a buffer with values"
            )
        return self._nodes[id(tensor)]

    def _here(self) -> str:
        return self._path[-1] or "forward"
