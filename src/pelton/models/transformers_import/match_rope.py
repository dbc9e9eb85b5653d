"""Finds rotary embeddings by what they compute, not by how they are spelled.

A tensor that depends on positions, constants and one other tensor x of its shape is evaluated on random
values; where it equals ``rope`` or ``rope_interleaved`` of x with one of the constants as frequencies,
it is that. So halves, neighbouring pairs, partial rotations and scaled tables need no pattern each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from pelton.models.transformers_import.packed import Edit, evaluate

aten: Any = torch.ops.aten
pelton: Any = torch.ops.pelton

#: Ops that a rotation may consist of; anything else is a tensor that is rotated.
_PARTS = frozenset(
    {
        aten.add.Tensor, aten.cat.default, aten.cos.default, aten.mul.Tensor, aten.neg.default,
        aten.permute.default, aten.repeat_interleave.self_int, aten.select.int, aten.sin.default,
        aten.slice.Tensor, aten.sub.Tensor, aten.to.dtype, aten.view.default, pelton.copy.default,
    }
)  # fmt: skip
_POSITIONS = (0, 1, 2, 17, 100)


def match_rope(edit: Edit) -> None:
    """Put ``rope_cos_sin`` (once for each table) and ``rope`` or ``rope_interleaved``."""
    positions = next(n for n in edit.packed.graph.nodes if n.op == "placeholder" and n.target == "positions")
    _Matcher(edit, positions).run()


class _Matcher:
    def __init__(self, edit: Edit, positions: fx.Node) -> None:
        self._edit, self._positions = edit, positions
        self._tables: dict[Any, fx.Node] = {}
        self._order = {n: i for i, n in enumerate(edit.packed.graph.nodes)}
        self._leaves: dict[fx.Node, frozenset[fx.Node]] = {}
        for node in self._order:
            inside = self._is_part(node)
            parts = (self._leaves[n] for n in node.all_input_nodes)
            self._leaves[node] = frozenset().union(*parts) if inside else frozenset({node})

    def run(self) -> None:
        for node in reversed(self._edit.nodes):
            if not node._erased and self._is_candidate(node):
                self._try(node)

    def _is_part(self, node: fx.Node) -> bool:
        """Whether a rotation may contain the call: rows of a constant table are read by position too."""
        if node.target is pelton.embedding.default:
            ids, table = node.args
            return ids is self._positions and str(table.target) in self._edit.packed.constants  # type: ignore[union-attr]
        return node.target in _PARTS

    def _is_constant(self, node: fx.Node) -> bool:
        return all(
            n.op == "get_attr" and str(n.target) in self._edit.packed.constants for n in self._leaves[node]
        )

    def _is_candidate(self, node: fx.Node) -> bool:
        leaves = self._leaves[node]
        others = [n for n in leaves if n is not self._positions and n.op != "get_attr"]
        return self._positions in leaves and len(others) > 0 and node.meta["val"].dim() in (2, 3)

    def _try(self, y: fx.Node) -> None:
        x = self._rotated(y)
        if x is None or x.meta["val"].shape != y.meta["val"].shape:
            return
        generator = torch.Generator().manual_seed(1)
        values = torch.randn(len(_POSITIONS), *x.meta["val"].shape[1:], generator=generator)
        places = torch.tensor(_POSITIONS, dtype=torch.int32)
        if any(str(n.target) in self._edit.packed.recipes for n in self._between(x, y)):
            return  # weights take part
        got = evaluate(y, {x: values, self._positions: places}, self._edit.packed.constants)
        flat = values.shape if values.dim() == 3 else (values.shape[0], 1, values.shape[1])
        for frequencies in self._frequencies(x, y):
            for op in (pelton.rope.default, pelton.rope_interleaved.default):
                scale = _scale(op, values.view(flat), got.reshape(flat), places, frequencies)
                if scale is not None:
                    self._replace(y, x, op, frequencies, scale)
                    return

    def _between(self, x: fx.Node, y: fx.Node) -> set[fx.Node]:
        """What y is computed from, x and what x is computed from excepted."""
        found, stack = {y}, [y]
        while stack:
            new = {n for n in stack.pop().all_input_nodes if n is not x and n not in found}
            found |= new
            stack += new
        return found

    def _rotated(self, y: fx.Node) -> fx.Node | None:
        """The tensor through which alone y depends on anything but positions and constants."""
        inside = {y}
        for node in reversed(self._order):
            if node in inside and not node._erased:
                inside.update(n for n in node.all_input_nodes if self._is_part(node))
        positional = {n for n in inside if self._positions in self._leaves[n]}
        front = {
            n for n in inside - positional
            if not self._is_constant(n) and any(u in positional for u in n.users)
        }  # fmt: skip
        while len(front) > 1:
            last = max(front, key=lambda n: self._order[n])
            if not self._is_part(last):
                return None
            front.remove(last)
            front.update(n for n in last.all_input_nodes if not self._is_constant(n))
        return front.pop() if front else None

    def _frequencies(self, x: fx.Node, y: fx.Node) -> list[Any]:
        found = []
        for leaf in self._leaves[y]:
            values = self._edit.packed.constants.get(str(leaf.target))
            if values is not None and values.dim() == 1:
                found += [values, values[: len(values) // 2], values[::2]]
            elif values is not None and values.dim() == 2:
                found += _frequencies_of(values)
        # Where two values of a head turn, the one frequency is a number, and 1 is multiplied away.
        factors = [n.args[1] for n in self._between(x, y) if n.target is aten.mul.Tensor]
        return [*found, *(torch.tensor([f]) for f in (1.0, *factors) if isinstance(f, float))]

    def _replace(self, y: fx.Node, x: fx.Node, op: Any, frequencies: Any, scale: float) -> None:
        table = self._table(frequencies, scale)
        if x.meta["val"].dim() == 3:
            self._edit.replace(y, op, x, table)
            return
        width = x.meta["val"].shape[1]
        with self._edit.packed.graph.inserting_before(y):
            head = self._edit.insert(aten.view.default, x, [-1, 1, width], where=y.meta["where"])
            turned = self._edit.insert(op, head, table, where=y.meta["where"])
        self._edit.replace(y, aten.view.default, turned, [-1, width])

    def _table(self, frequencies: Any, scale: float) -> fx.Node:
        constant = self._edit.packed.constant(frequencies)
        if (constant, scale) not in self._tables:
            with self._edit.packed.graph.inserting_before(self._edit.nodes[0]):
                self._tables[constant, scale] = self._edit.insert(
                    pelton.rope_cos_sin.default, self._positions, constant, scale, where=""
                )
        return self._tables[constant, scale]


def _frequencies_of(table: Any) -> list[Any]:
    """Frequencies whose sines and cosines the rows of ``table`` are, in either order."""
    half = table.shape[1] // 2
    if len(table) < 2 or half < 2 or table.shape[1] % 2:
        return []
    positions = torch.arange(len(table))
    found = []
    for sin, cos in ((table[:, :half], table[:, half:]), (table[:, half:], table[:, :half])):
        angles = torch.atan2(sin[1].double(), cos[1].double())
        # Frequencies are powers of a base, which is a whole number; angles alone are not exact enough.
        base = round(float(angles[-1]) ** (-half / (half - 1))) if 0 < angles[-1] < 1 else 0
        frequencies = 1.0 / (float(base or 1) ** (torch.arange(0, half).float() / half))
        want = pelton.rope_cos_sin(positions, frequencies, 1.0)
        if (want - torch.cat([cos, sin], dim=-1)).abs().max() < 1e-4:
            found.append(frequencies)
    return found


def _scale(op: Any, x: Any, got: Any, positions: Any, frequencies: Any) -> float | None:
    """What multiplies the table so that ``op`` gives ``got``; None where nothing does."""
    rotary = 2 * len(frequencies)
    if not 0 < rotary <= x.shape[-1]:
        return None
    want = op(x, pelton.rope_cos_sin(positions, frequencies, 1.0))
    scale = float((got[..., :rotary] * want[..., :rotary]).sum() / want[..., :rotary].square().sum())
    # A table's factor is written with few digits, or is none.
    scale = 1.0 if abs(scale - 1) < 1e-6 else float(f"{scale:.7g}")
    want = torch.cat([want[..., :rotary] * scale, want[..., rotary:]], dim=-1)
    return scale if (got - want).abs().max() < 1e-5 * got.abs().max() else None
