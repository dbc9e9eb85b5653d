"""Finds activations, gated ones and caps of logits, spelled as one op or as several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from pelton.ir.ops.activation import KINDS
from pelton.models.transformers_import.packed import Edit, evaluate

aten: Any = torch.ops.aten
pelton: Any = torch.ops.pelton

_ONE_OP = {aten.silu.default: "silu", aten.relu.default: "relu"}
_ELEMENTWISE = frozenset(
    {
        aten.add.Tensor, aten.div.Tensor, aten.mul.Tensor, aten.pow.Tensor_Scalar, aten.sigmoid.default,
        aten.sub.Tensor, aten.tanh.default,
    }
)  # fmt: skip


def match_activations(edit: Edit) -> None:
    """Put ``softcap``, ``activation`` and ``gated_activation`` for them."""
    for node in edit.nodes:
        if node._erased:
            continue
        if node.target is aten.tanh.default and _cap(edit, node):
            continue
        if node.target in (aten.tanh.default, aten.sigmoid.default):
            _spelled_out(edit, node)
        elif node.target in _ONE_OP:
            edit.replace(node, pelton.activation.default, node.args[0], _ONE_OP[node.target])
        elif node.target is aten.gelu.default:
            kind = "gelu_tanh" if node.kwargs.get("approximate", "none") == "tanh" else "gelu"
            edit.replace(node, pelton.activation.default, node.args[0], kind)
    for node in edit.nodes:
        if node.target is aten.mul.Tensor and not node._erased:
            _gate(edit, node)


def _cap(edit: Edit, tanh: fx.Node) -> bool:
    """``cap * tanh(x / cap)``."""
    inner, users = tanh.args[0], list(tanh.users)
    assert isinstance(inner, fx.Node)
    if (
        len(users) != 1
        or users[0].target is not aten.mul.Tensor
        or not isinstance(users[0].args[1], int | float)
    ):
        return False
    cap, factor = float(users[0].args[1]), inner.args[1] if len(inner.args) > 1 else None
    divides = inner.target is aten.div.Tensor and factor == cap
    multiplies = (
        inner.target is aten.mul.Tensor and isinstance(factor, float) and abs(factor * cap - 1) < 1e-6
    )
    if not divides and not multiplies:
        return False
    edit.replace(users[0], pelton.softcap.default, inner.args[0], cap)
    return True


def _spelled_out(edit: Edit, start: fx.Node) -> None:
    """An activation of several ops around ``start``: recognised by its values."""
    chain = [start]
    while len(chain[-1].users) == 1 and len(chain) < 6:
        user = next(iter(chain[-1].users))
        if user.target not in _ELEMENTWISE:
            break
        chain.append(user)
    values = torch.linspace(-8, 8, 1001)[None]
    for y in reversed(chain):
        for x in _sources(y):
            got = evaluate(y, {x: values}, edit.packed.constants)
            for kind, function in KINDS.items():
                if torch.allclose(got, function(values), rtol=1e-5, atol=1e-6):
                    edit.replace(y, pelton.activation.default, x, kind)
                    return


def _sources(y: fx.Node) -> Iterator[fx.Node]:
    """Each tensor through which alone y is computed, element by element; the nearest first."""
    order = {n: i for i, n in enumerate(y.graph.nodes)}
    front = {y}
    while front:
        last = max(front, key=lambda n: order[n])
        if len(front) == 1 and last is not y and last.meta["val"].shape == y.meta["val"].shape:
            yield last
        if last.target not in _ELEMENTWISE:
            return
        front.remove(last)
        front.update(last.all_input_nodes)


def _gate(edit: Edit, product: fx.Node) -> None:
    for gate, up in (product.args[:2], product.args[1::-1]):
        if not isinstance(gate, fx.Node) or not isinstance(up, fx.Node) or gate is up:
            continue
        plain = gate.target is pelton.activation.default and len(gate.users) == 1
        if plain and gate.args[1] != "relu" and gate.meta["val"].shape == up.meta["val"].shape:
            edit.replace(product, pelton.gated_activation.default, gate.args[0], up, gate.args[1])
            return
