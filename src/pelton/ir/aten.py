"""ATen arithmetic as Pelton ops: what makes plain PyTorch in a model's ``forward`` run.

``RULES`` has a function for each ATen op, with its arguments, that calls Pelton ops instead, or returns
``NotImplemented`` where none fits. Sums and products of equal shapes, and products with a number, stay
``aten.add`` and ``aten.mul`` (``COMPUTE``): fusing passes match them, and the builder knows their ops.

A rule may ask for types, numbers of axes and sizes other than the first axis', which is dynamic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import pelton.ir.ops  # noqa: F401  registers the ops
from pelton.ir.op import op_of_target

aten: Any = torch.ops.aten
_ops: Any = torch.ops.pelton

#: ATen ops that stay: elementwise, with a tensor of equal shape, or a product with a number.
COMPUTE = frozenset({aten.add.Tensor, aten.mul.Tensor})

Rule = Callable[..., Any]


def is_dense(value: Any) -> bool:
    """Whether a tensor's last axis is dense in memory, as kernels need it."""
    return bool(value.dim() == 0 or value.stride(-1) == 1 or value.shape[-1] == 1)


def needs_dense(target: Any) -> bool:
    """Whether ``target`` computes, with kernels that need operands dense along their last axis."""
    op = op_of_target(target)
    return target in COMPUTE if op is None else not op.any_strides


def make_dense(value: Any) -> Any:
    """A tensor that kernels can read: a ``copy`` of a view that they cannot."""
    return value if not isinstance(value, torch.Tensor) or is_dense(value) else _ops.copy(value)


# ---- Elementwise ----


def _unary(kind: str) -> Rule:
    return lambda x: _ops.unary(x, kind) if _floats(x) else NotImplemented


def _activation(kind: str) -> Rule:
    return lambda x: _ops.activation(x, kind)


def _gelu(x: Any, approximate: str = "none") -> Any:
    return _ops.activation(x, "gelu_tanh" if approximate == "tanh" else "gelu")


def _add(x: Any, y: Any, alpha: float = 1) -> Any:
    if alpha != 1 or _same_shape(x, y):
        return NotImplemented
    return _binary(x, y, "add")


def _mul(x: Any, y: Any) -> Any:
    if _same_shape(x, y) or not isinstance(y, torch.Tensor):
        return NotImplemented
    return _binary(x, y, "mul")


def _sub(x: Any, y: Any, alpha: float = 1) -> Any:
    if alpha != 1:
        return NotImplemented
    return _binary(x, y, "sub") if isinstance(y, torch.Tensor) else _binary(x, -y, "add")


def _rsub(x: Any, y: Any, alpha: float = 1) -> Any:
    if alpha != 1:
        return NotImplemented
    return _binary(y, x, "sub") if isinstance(y, torch.Tensor) else _binary(x, y, "rsub")


def _pow(x: Any, exponent: Any) -> Any:
    named = {2.0: "square", 0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}
    if isinstance(exponent, torch.Tensor) or exponent not in named:
        return _binary(x, exponent, "pow")
    return _unary(named[exponent])(x)


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    for bound, kind in ((min, "max"), (max, "min")):
        if bound is not None and x is not NotImplemented:
            x = _binary(x, bound, kind)
    return x


def _pairs(kind: str) -> Rule:
    return lambda x, y: _binary(x, y, kind)


def _binary(x: Any, y: Any, kind: str) -> Any:
    if isinstance(y, torch.Tensor):
        return _ops.binary(x, y, kind) if _floats(x, y) else NotImplemented
    return _ops.binary_scalar(x, float(y), kind) if _floats(x) else NotImplemented


def _floats(*tensors: Any) -> bool:
    return all(t.dtype.is_floating_point for t in tensors)


def _same_shape(x: Any, y: Any) -> bool:
    return isinstance(y, torch.Tensor) and x.shape == y.shape


# ---- Rows ----


def _reduce(kind: str) -> Rule:
    def rule(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
        dims = [dim] if isinstance(dim, int) else dim
        if not dims or len(dims) != 1 or not _last(x, dims[0]) or x.dim() < 2 or dtype not in (None, x.dtype):
            return NotImplemented
        return _ops.reduce(x, kind, keepdim)

    return rule


def _softmax(x: Any, dim: int, dtype: Any = None) -> Any:
    return _ops.softmax(x) if _last(x, dim) and dtype in (None, x.dtype) else NotImplemented


def _layer_norm(
    x: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    return _ops.layer_norm(x, weight, bias, eps) if len(normalized_shape) == 1 else NotImplemented


def _rms_norm(x: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Any:
    if len(normalized_shape) != 1 or weight is None:
        return NotImplemented
    return _ops.rms_norm(x, weight, torch.finfo(torch.float32).eps if eps is None else eps)


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    return _ops.linear(x, weight, bias) if x.dim() == 2 else NotImplemented


def _embedding(weight: Any, ids: Any, *_: Any) -> Any:
    return _ops.embedding(ids, weight) if ids.dim() == 1 else NotImplemented


def _last(x: Any, dim: int) -> bool:
    return dim in (-1, x.dim() - 1)


# ---- Memory and types ----


def _to(x: Any, dtype: Any, *_: Any, **__: Any) -> Any:
    return x if dtype == x.dtype else NotImplemented


def _type_as(x: Any, other: Any) -> Any:
    return _to(x, other.dtype)


def _dropout(x: Any, p: float, train: bool) -> Any:
    return NotImplemented if train else x


def _contiguous(x: Any, memory_format: Any = None) -> Any:
    """Memory between rows may stay: kernels step over it, and no view regroups the first axis."""
    return x if x.dim() == 0 or x[:1].is_contiguous() else _ops.copy(x)


def _reshape(x: Any, shape: Sequence[int]) -> Any:
    """A view, of a copy where the memory does not allow one."""
    try:
        return x.view(shape)
    except RuntimeError:
        return _ops.copy(x).view(shape)


def _flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    start, end = start_dim % x.dim(), end_dim % x.dim()
    if start == 0 and end > 0:
        return NotImplemented
    return _reshape(x, (-1, *x.shape[1:start], x.shape[start : end + 1].numel(), *x.shape[end + 1 :]))


_UNARY = (
    "abs",
    "cos",
    "exp",
    "log",
    "neg",
    "reciprocal",
    "rsqrt",
    "sigmoid",
    "sin",
    "sqrt",
    "square",
    "tanh",
)

RULES: dict[Any, Rule] = {
    **{getattr(aten, kind).default: _unary(kind) for kind in _UNARY},
    **{getattr(aten, kind).default: _activation(kind) for kind in ("relu", "silu")},
    aten.gelu.default: _gelu,
    aten.add.Tensor: _add,
    aten.add.Scalar: _add,
    aten.mul.Tensor: _mul,
    aten.sub.Tensor: _sub,
    aten.sub.Scalar: _sub,
    aten.rsub.Tensor: _rsub,
    aten.rsub.Scalar: _rsub,
    aten.div.Tensor: _pairs("div"),
    aten.div.Scalar: _pairs("div"),
    aten.pow.Tensor_Scalar: _pow,
    aten.pow.Tensor_Tensor: _pow,
    aten.maximum.default: _pairs("max"),
    aten.minimum.default: _pairs("min"),
    aten.clamp.default: _clamp,
    aten.clamp.Tensor: _clamp,
    aten.clamp_min.default: _clamp,
    aten.clamp_max.default: lambda x, max: _clamp(x, None, max),
    aten.mean.dim: _reduce("mean"),
    aten.sum.dim_IntList: _reduce("sum"),
    aten.amax.default: _reduce("max"),
    aten.softmax.int: _softmax,
    aten.linear.default: _linear,
    aten.embedding.default: _embedding,
    aten.layer_norm.default: _layer_norm,
    aten.rms_norm.default: _rms_norm,
    aten.to.dtype: _to,
    aten.type_as.default: _type_as,
    aten.dropout.default: _dropout,
    aten.contiguous.default: _contiguous,
    aten.clone.default: lambda x, memory_format=None: _ops.copy(x),
    aten.reshape.default: _reshape,
    aten.flatten.using_ints: _flatten,
}
