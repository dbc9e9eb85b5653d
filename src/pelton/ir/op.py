"""What an operation is: schema, reference, shape rule, sample inputs, tolerance.

Each op is one ``torch.library`` op whose implementation is its reference in plain PyTorch, so a
model runs eagerly on references and is traced into nodes of these ops. Tactics (``kernels/``)
implement ops for a device and are held to the reference by the conformance suite.

This module needs torch; the runtime never imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

NAMESPACE = "pelton"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One generated input of an op: positional arguments in the schema's order.

    ``quant`` gives, by argument index, the weight's quantised type; the argument itself holds the
    dequantised values, and the conformance suite quantises and packs them for the tactic.
    """

    args: tuple[Any, ...]
    name: str = ""
    quant: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Op:
    """An operation of the graph."""

    name: str
    """Such as ``rms_norm``; ops from outside Pelton have their namespace before it: ``my::swish_norm``."""
    schema: str
    reference: Callable[..., Any]
    shape_rule: Callable[..., Any]
    """Takes fake tensors, returns outputs of the right shape and dtype without computing."""
    samples: Callable[[torch.Generator], Iterator[Sample]]
    tolerance: Mapping[str, float]
    """Largest allowed normalised error (see ``kernels/conformance.py``) by compute dtype."""
    mutates: tuple[int, ...] = ()
    """Indices of arguments written in place: such nodes are ordered effects."""
    optional: bool = False
    """Only passes make such a node, and only where the target has a kernel for it (``context.supports``)."""
    any_strides: bool = False
    """Its inputs may be views whose last axis is not dense; all others get a ``copy`` of such a view."""

    @property
    def torch_op(self) -> Any:
        namespace, _, name = qualified(self.name).partition("::")
        return getattr(getattr(torch.ops, namespace), name).default


_OPS: dict[str, Op] = {}
_LIBRARIES: dict[str, Any] = {}


def qualified(name: str) -> str:
    """``pelton::rms_norm`` of ``rms_norm``; a name with a namespace stays."""
    return name if "::" in name else f"{NAMESPACE}::{name}"


def register(op: Op) -> Op:
    """Define ``op`` in torch and make it findable by name; raises ``ValueError`` on a second one."""
    if op.name in _OPS:
        raise ValueError(f"op {op.name!r} is registered twice")
    namespace, _, name = qualified(op.name).partition("::")
    if namespace not in _LIBRARIES:
        _LIBRARIES[namespace] = torch.library.Library(namespace, "FRAGMENT")
    library = _LIBRARIES[namespace]
    library.define(op.schema.partition("::")[2] or op.schema)
    library.impl(name, op.reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{namespace}::{name}", op.shape_rule, lib=library)
    _OPS[op.name] = op
    return op


def all_ops() -> dict[str, Op]:
    """Every registered op by name (imports ``pelton.ir.ops`` first)."""
    import pelton.ir.ops  # noqa: F401  registers them

    return dict(_OPS)


def get_op(name: str) -> Op:
    """The op called ``name``; raises ``KeyError`` when there is none."""
    op = find_op(name)
    if op is None:
        raise KeyError(name)
    return op


def find_op(name: str) -> Op | None:
    """As ``get_op``, but None where there is none."""
    if not _OPS:
        all_ops()
    return _OPS.get(name)


def op_of_target(target: Any) -> Op | None:
    """The op behind a ``torch.ops`` overload (what a graph node calls), or None."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    name = target._schema.name
    return find_op(name.removeprefix(f"{NAMESPACE}::"))


def check_float(name: str, *tensors: torch.Tensor) -> None:
    """Raise ``ValueError`` where an input of the op ``name`` is not of a floating-point type."""
    for tensor in tensors:
        if not tensor.dtype.is_floating_point:
            raise ValueError(f"{name} takes floating-point tensors, not {tensor.dtype}")
