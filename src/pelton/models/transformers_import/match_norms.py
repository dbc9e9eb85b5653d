"""Finds norms in whatever way they are spelled: ``x * rsqrt(mean(x^2) + eps)``, of ``x - mean(x)`` too."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from pelton.models.transformers_import.packed import Edit

aten: Any = torch.ops.aten
pelton: Any = torch.ops.pelton


def match_norms(edit: Edit) -> None:
    """Put ``rms_norm`` and ``layer_norm`` for them, with their weights and biases."""
    for node in edit.nodes:
        if node.target in (aten.mul.Tensor, aten.div.Tensor) and not node._erased:
            found = _normalised(node)
            if found is not None:
                _replace(edit, node, *found)


def _normalised(node: fx.Node) -> tuple[fx.Node, float, bool] | None:
    """(x, eps, centred) where ``node`` is the norm of x without weights."""
    for x, factor in (node.args[:2], node.args[1::-1]):
        if not isinstance(x, fx.Node) or not isinstance(factor, fx.Node):
            continue
        variance = _reciprocal_root(factor) if node.target is aten.mul.Tensor else _root(factor)
        if variance is None or variance.target is not aten.add.Tensor:
            continue
        mean, eps = variance.args[:2]
        if not isinstance(eps, float | int) or not isinstance(mean, fx.Node) or not _is_mean(mean):
            continue
        if _squared(mean.args[0]) is not x:
            continue
        if x.target is aten.sub.Tensor and _is_mean(x.args[1]) and x.args[1].args[0] is x.args[0]:
            return x.args[0], float(eps), True
        return x, float(eps), False
    return None


def _reciprocal_root(node: fx.Node) -> fx.Node | None:
    """v of ``1 / sqrt(v)``."""
    if node.target is aten.rsqrt.default or (node.target is aten.pow.Tensor_Scalar and node.args[1] == -0.5):
        return node.args[0]  # type: ignore[return-value]
    if node.target is aten.reciprocal.default:
        return _root(node.args[0])
    return None


def _root(node: Any) -> fx.Node | None:
    """v of ``sqrt(v)``."""
    power = node.target is aten.pow.Tensor_Scalar and node.args[1] == 0.5
    return node.args[0] if power or node.target is aten.sqrt.default else None


def _is_mean(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.mean.dim


def _squared(node: Any) -> Any:
    """x of ``x * x``."""
    if node.target is aten.square.default or (node.target is aten.pow.Tensor_Scalar and node.args[1] == 2):
        return node.args[0]
    if node.target is aten.mul.Tensor and node.args[0] is node.args[1]:
        return node.args[0]
    return None


def _replace(edit: Edit, node: fx.Node, x: fx.Node, eps: float, centred: bool) -> None:
    out, weight = _times_weight(node)
    bias = None
    if centred and weight is not None:
        out, bias = _plus_bias(out)
    if centred:
        edit.replace(out, pelton.layer_norm.default, x, weight, bias, eps)
        return
    if weight is None:
        weight = edit.packed.constant(torch.ones(x.meta["val"].shape[-1]))
    edit.replace(out, pelton.rms_norm.default, x, weight, eps)


def _times_weight(node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    return _with_vector(node, aten.mul.Tensor)


def _plus_bias(node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    return _with_vector(node, aten.add.Tensor)


def _with_vector(node: fx.Node, target: Any) -> tuple[fx.Node, fx.Node | None]:
    """The only reader of ``node`` where it applies a vector over the last dimension, and that vector."""
    if len(node.users) == 1:
        user = next(iter(node.users))
        if user.target is target and len(user.args) == 2:
            vector = user.args[1] if user.args[0] is node else user.args[0]
            width = node.meta["val"].shape[-1]
            weight = isinstance(vector, fx.Node) and vector.op == "get_attr"
            if weight and tuple(vector.meta["val"].shape) == (width,):
                return user, vector
    return node, None
