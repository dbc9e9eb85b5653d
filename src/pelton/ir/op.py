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

LIBRARY = torch.library.Library("pelton", "DEF")


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
    """Without the namespace, such as ``rms_norm``."""
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

    @property
    def torch_op(self) -> Any:
        return getattr(torch.ops.pelton, self.name).default


_OPS: dict[str, Op] = {}


def register(op: Op) -> Op:
    """Define ``op`` in torch and make it findable by name; raises ``ValueError`` on a second one."""
    if op.name in _OPS:
        raise ValueError(f"op {op.name!r} is registered twice")
    LIBRARY.define(op.schema)
    LIBRARY.impl(op.name, op.reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pelton::{op.name}", op.shape_rule, lib=LIBRARY)
    _OPS[op.name] = op
    return op


def all_ops() -> dict[str, Op]:
    """Every registered op by name (imports ``pelton.ir.ops`` first)."""
    import pelton.ir.ops  # noqa: F401  registers them

    return dict(_OPS)


def get_op(name: str) -> Op:
    """The op called ``name``; raises ``KeyError`` when there is none."""
    return all_ops()[name]
