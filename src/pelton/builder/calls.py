"""From the graph to a list of op calls over memory: views disappear into strides and offsets.

The graph is run once more on meta tensors. Their views share the base's storage, so which memory
a node looks at, and how, is read off the tensors instead of being derived op by op; what claims to
be a view but would copy is caught.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from pelton.engine.plan import Dim
from pelton.errors import BuildError
from pelton.ir.graph import Graph
from pelton.ir.op import Op, get_op
from pelton.ir.types import GraphInput

Attr = bool | int | float | str

aten: Any = torch.ops.aten


@dataclass(eq=False)
class Root:
    """A piece of memory: an input of the graph, or the result of a call."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    source: GraphInput | None = None
    """None: made by a call, lives in the arena."""

    @property
    def is_weight(self) -> bool:
        return self.source is not None and self.source.kind == "weight"


@dataclass(eq=False)
class Value:
    """A view of a root; shapes as in ``plan.Operand``."""

    name: str
    root: Root
    shape: tuple[Dim, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(eq=False)
class Call:
    """One op over values; ``None``: an optional input that is absent."""

    op: Op
    name: str
    inputs: tuple[Value | None, ...]
    outputs: tuple[Value, ...]
    attrs: dict[str, Attr] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """The calls of a step in order."""

    calls: tuple[Call, ...]
    logits: Value


def extract(graph: Graph) -> Program:
    """The program of a verified graph. Raises ``BuildError`` on what a plan cannot hold."""
    return _Extraction(graph).run()


class _Extraction:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._meta: dict[fx.Node, Any] = {}
        self._roots: dict[int, Root] = {}
        """By storage identity; ``_meta`` keeps the storages alive, so identities are not reused."""
        self._values: dict[tuple[fx.Node, int], Value] = {}
        self._calls: list[Call] = []
        self._names: dict[str, int] = {}

    def run(self) -> Program:
        for node in self._graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
        with torch.inference_mode():
            for node in self._graph.calls:
                self._call(node)
        return Program(tuple(self._calls), self._value(self._graph.logits))

    def _placeholder(self, node: fx.Node) -> None:
        meta = node.meta["val"]
        source = self._graph.input_of(node)
        root = Root(source.name, _dtype(meta), self._graph.shape(meta), source)
        self._meta[node] = meta
        self._roots[_storage(meta)] = root
        self._values[node, 0] = Value(source.name, root, root.shape, _strides(meta), 0)

    def _call(self, node: fx.Node) -> None:
        arguments = fx.node.map_arg(node.args, lambda n: self._meta[n])
        named = fx.node.map_arg(node.kwargs, lambda n: self._meta[n])
        if node.target is operator.getitem:
            self._meta[node] = arguments[0][arguments[1]]
            return
        compute = self._as_op(node)
        recorded = node.meta["val"]
        if compute is not None and not any(_storage(t) in self._roots for t in _tensors(recorded)):
            # A fresh tensor is as good as the recorded one; only views need running.
            self._meta[node] = recorded
        else:
            self._meta[node] = node.target(*arguments, **named)  # type: ignore[operator]
        if compute is None:
            for tensor in _tensors(self._meta[node]):
                if _storage(tensor) not in self._roots:
                    raise BuildError(
                        f"{node.name} ({node.target}) copies memory that a plan could only view; "
                        "make its input contiguous in the model"
                    )
            return
        op, flat = compute
        outputs, short = [], op.name.rpartition("::")[2]
        for i, tensor in enumerate(_tensors(self._meta[node])):
            name = self._name(node, short if i == 0 else f"{short}.{i}")
            root = Root(name, _dtype(tensor), self._graph.shape(tensor))
            if _storage(tensor) in self._roots:
                raise BuildError(f"{node.name} ({op.name}) returns a view of its input")
            self._roots[_storage(tensor)] = root
            value = Value(name, root, root.shape, _strides(tensor), 0)
            self._values[node, i] = value
            outputs.append(value)
        inputs: list[Value | None] = []
        attrs: dict[str, Attr] = {}
        for parameter, value in zip(op.torch_op._schema.arguments, flat, strict=True):
            if "Tensor" in str(parameter.type):
                inputs.append(None if value is None else self._value(value))
            elif value is not None:
                attrs[parameter.name] = value
        name = outputs[0].name if outputs else self._name(node, op.name)
        self._calls.append(Call(op, name, tuple(inputs), tuple(outputs), attrs))

    def _as_op(self, node: fx.Node) -> tuple[Op, list[Any]] | None:
        """The op that computes ``node`` and its arguments in the schema's order; None: a view."""
        op = self._graph.op_of(node)
        if op is not None:
            return op, _schema_arguments(node)
        if node.target is aten.add.Tensor:
            return get_op("add"), list(node.args[:2])
        if node.target is aten.mul.Tensor:
            other = node.args[1]
            if isinstance(other, fx.Node):
                return get_op("mul"), list(node.args[:2])
            return get_op("scale"), [node.args[0], float(other)]  # type: ignore[arg-type]
        return None

    def _value(self, node: fx.Node) -> Value:
        """What ``node`` looks at; a view becomes a value when it is first used."""
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, fx.Node) and isinstance(index, int)
            if (source, index) in self._values:
                return self._values[source, index]
        if (node, 0) not in self._values:
            meta = self._meta[node]
            root = self._roots[_storage(meta)]
            short = str(node.target.__name__ if callable(node.target) else node.target).split(".")[0]
            self._values[node, 0] = Value(
                self._name(node, "view" if short == "getitem" else short),
                root,
                self._graph.shape(meta),
                _strides(meta),
                int(meta.storage_offset()),
            )
        return self._values[node, 0]

    def _name(self, node: fx.Node, what: str) -> str:
        """``MODULE.what``, numbered when the module has several."""
        where = node.meta.get("where", "")
        base = f"{where}.{what}" if where else what
        count = self._names.get(base, 0)
        self._names[base] = count + 1
        return f"{base}.{count}" if count else base


def _schema_arguments(node: fx.Node) -> list[Any]:
    given: list[Any] = list(node.args)
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    for parameter in schema[len(given) :]:
        given.append(node.kwargs.get(parameter.name, parameter.default_value))
    return given


def _tensors(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _strides(tensor: Any) -> tuple[int, ...]:
    return tuple(int(s) for s in tensor.stride())


_storage: Callable[[Any], int] = lambda tensor: tensor.untyped_storage()._cdata
