"""What a pass is: its description, what it may know, what it reports. Running them: ``passes/run.py``."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping as Dict
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch import fx

from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.condition import SameValues
from pelton.ir.graph import Graph
from pelton.ir.op import get_op
from pelton.ir.recipe import Recipe
from pelton.ir.tensors import HostTensor
from pelton.kernels.tactic import NodeSpec, TensorSpec
from pelton.mapping import Mapping

Mode = Literal["auto", "force", "off"]
Kind = Literal["model", "graph"]


ALONE = Mapping()


def _no_values(recipe: Recipe) -> HostTensor:
    raise AssertionError("this context has no checkpoint to read")


@dataclass(frozen=True, kw_only=True)
class PassContext:
    """What a pass may know besides the model or graph."""

    quant_of: Callable[[Recipe], str]
    """Value type (dense dtype or block type) of what a recipe gives, as the checkpoint stores it."""
    read: Callable[[Recipe], HostTensor] = _no_values
    """Evaluates a recipe now. Read only what must be known, in pieces (``Rows``): memory is bounded."""
    resolve: Callable[[Recipe], Recipe] = lambda recipe: recipe
    """A recipe over what the checkpoint's files hold (``Checkpoint.source``)."""
    stored_quant: Callable[[Recipe, int], str] = lambda recipe, dimensions: "float32"
    """Value type in which the engine stores what a recipe gives, a weight of so many dimensions."""
    activations: str = "float32"
    """Input precision of quantised products."""
    input_quants: Callable[[Recipe], tuple[ActivationQuant | None, ...]] = lambda recipe: ()
    """How the checkpoint quantises the input of each linear layer of which a weight is made; none where the
    target has its own way."""
    kv_scales: Dict[int, tuple[list[float], list[float]]] = field(default_factory=dict)
    """By layer, the scales of K and V for each KV head, of caches of 8 bits (ones until measured)."""
    key_rounding: Dict[int, tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]] = field(
        default_factory=dict
    )
    """By layer, what caches of 8 bits store the keys without (KV heads, head_dim), and which queries they
    meet (KV heads, 2 head_dim); absent: each key is rounded as it is."""
    key_sizes: Dict[int, npt.NDArray[np.float32]] = field(default_factory=dict)
    """By layer, the largest magnitude of each channel of the keys on text (KV heads, head_dim), where
    caches are int8 and their scales measured."""
    mapping: Mapping = ALONE
    """The rank that is built for."""
    has_tactic: Callable[[NodeSpec], bool] = lambda spec: True
    """Whether the target has a kernel for a call; ask through ``supports``."""
    modes: Dict[str, Mode] = field(default_factory=dict)
    """The user's choice by pass; absent: auto."""
    fast: bool = False
    """A fast build: only passes that are marked so, and those that are forced."""

    def forced(self, name: str) -> bool:
        """Whether the user forces the pass ``name``: then it also does what is exact but not faster."""
        return self.modes.get(name) == "force"

    def supports(self, graph: Graph, op: str, args: tuple[Any, ...]) -> bool:
        """Whether the target has a kernel for the Pelton op called with ``args``: nodes (or what they
        will be), numbers and None in the schema's order. Nothing is fused into an op that only the
        reference could run."""
        parameters = get_op(op).torch_op._schema.arguments
        given = [*args, *(p.default_value for p in parameters[len(args) :])]
        inputs: list[TensorSpec | None] = []
        attrs: dict[str, Any] = {}
        for parameter, value in zip(parameters, given, strict=True):
            if "Tensor" in str(parameter.type):
                inputs.append(None if value is None else self._spec(graph, value))
            elif value is not None:
                attrs[parameter.name] = value
        return self.has_tactic(
            NodeSpec(op=op, inputs=tuple(inputs), attrs=attrs, activations=self.activations)
        )

    def _spec(self, graph: Graph, node: fx.Node | TensorSpec) -> TensorSpec:
        if isinstance(node, TensorSpec):
            return node
        kind = graph.type_of(node)
        described = graph.inputs.get(node.name)
        if described is None or described.kind not in ("weight", "constant"):
            return TensorSpec(dtype=kind.dtype, shape=kind.shape)
        if described.kind == "constant":
            return TensorSpec.of_weight("float32", kind.shape)
        quant = self.stored_quant(graph.recipes[described.name], len(kind.shape))
        return TensorSpec.of_weight(quant, kind.shape)


@dataclass(frozen=True, kw_only=True)
class PassReport:
    """What a pass did. ``matched`` places were candidates: ``changed`` ones and ``skipped`` ones."""

    name: str
    matched: int
    changed: int
    skipped: tuple[tuple[str, str], ...] = field(default=())
    """(where, why) of each match that was left alone."""
    note: str = ""
    """Why the pass did not run at all; empty when it ran."""
    diff: str = ""
    """What it changed, as a unified diff of the graph's text or of the weights' recipes."""
    conditions: tuple[SameValues, ...] = ()
    """What the pass found to hold of the checkpoint's values: refitting an engine looks again."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A rewrite of the model or of the traced graph; ``docs/passes.md`` is made from these."""

    name: str
    kind: Kind
    """``model``: modules and weight recipes, before tracing; ``graph``: the ``ir.Graph``, after."""
    run: Callable[[Any, PassContext], PassReport]
    """Rewrites an ``nn.CausalLM`` or a ``Graph`` in place."""
    rewrite: str
    """What becomes what, in a line."""
    bound: str
    """How far results may move: "bit for bit", "float32 rounding", ..."""
    needs: tuple[str, ...] = ()
    """Passes that must stand earlier in the list, because this one works on what they leave."""
    undoes: str = ""
    """A pass that this one takes back: both cannot be forced, and forcing this one switches it off."""
    fast: bool = True
    """Part of a fast build."""
    default: bool = True
    """Runs unless switched off; else only when forced."""
