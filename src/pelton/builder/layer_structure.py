"""How the linear layers of a decoder layer hang together: which share an input, and what makes it.

Found by running the layer once and looking at which tensors pass between its modules, so that it holds for
any architecture. A factor for each channel of an input can go into what makes it: the weight of a norm, or
rows of a linear layer before it (the values of attention, the factor beside a gate).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pelton import nn
from pelton.quant.statistics import Float32


@dataclass(frozen=True)
class Rows:
    """Rows ``start:stop`` of the linear layer ``linear`` make the channels, each ``repeat`` times: the heads
    of grouped-query attention, ``head_dim`` channels each."""

    linear: str
    start: int
    stop: int
    repeat: int = 1
    head_dim: int = 1

    def of_rows(self, s: Float32) -> Float32:
        """Factors of the rows from factors of the channels that agree where rows repeat."""
        return np.ascontiguousarray(s.reshape(-1, self.repeat, self.head_dim)[:, 0]).reshape(-1)

    def agreeing(self, s: Float32) -> Float32:
        """Factors of channels, with their geometric mean where rows repeat."""
        logs = np.log(s.reshape(-1, self.repeat, self.head_dim)).mean(axis=1, keepdims=True)
        return np.repeat(np.exp(logs), self.repeat, axis=1).reshape(-1)


@dataclass(frozen=True)
class SharedInput:
    """An input of linear layers; names are those in the decoder layer."""

    linears: tuple[str, ...]
    norm: str | None = None
    """The norm that makes it."""
    rows: Rows | None = None
    """The rows that make it."""

    @property
    def foldable(self) -> bool:
        """Whether factors of its channels can go into what makes it."""
        return self.norm is not None or self.rows is not None

    def agreeing(self, s: Float32) -> Float32:
        """The nearest factors to ``s`` that can be folded."""
        return self.rows.agreeing(s) if self.rows is not None else s


def shared_inputs(layer: torch.nn.Module, run: Callable[[], Any]) -> list[SharedInput]:
    """The inputs of ``layer``'s linear layers in the order of their use; ``run`` runs it once."""
    used: dict[int, tuple[Any, list[str]]] = {}
    made: dict[int, str] = {}
    # Holds on to tensors, so that no two have one id.
    kept: list[Any] = []

    def on_linear(name: str) -> Any:
        def note(_: Any, arguments: tuple[Any, ...]) -> None:
            used.setdefault(id(arguments[0]), (arguments[0], []))[1].append(name)

        return note

    def on_norm(name: str) -> Any:
        def note(_: Any, __: Any, output: Any) -> None:
            kept.append(output)
            made[id(output)] = name

        return note

    hooks = []
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            hooks.append(module.register_forward_pre_hook(on_linear(name)))
        elif isinstance(module, nn.RMSNorm | nn.LayerNorm):
            hooks.append(module.register_forward_hook(on_norm(name)))
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    rows = _row_makers(layer)
    return [
        SharedInput(tuple(names), made.get(identity), rows.get(names[0]) if len(names) == 1 else None)
        for identity, (_, names) in used.items()
    ]


def _row_makers(layer: torch.nn.Module) -> dict[str, Rows]:
    """Linear layer -> the rows that its input is a product with."""
    found = {}
    for name, module in layer.named_modules():
        dot = f"{name}." if name else ""
        if isinstance(module, nn.Attention):
            kv = module.num_kv_heads * module.head_dim
            first = module.num_heads * module.head_dim + kv if module.packed else 0
            found[f"{dot}o_proj"] = Rows(
                dot + ("qkv_proj" if module.packed else "v_proj"),
                first,
                first + kv,
                module.num_heads // module.num_kv_heads,
                module.head_dim,
            )
        elif isinstance(module, nn.GatedMLP):
            first = module.intermediate_size if module.packed else 0
            found[f"{dot}down_proj"] = Rows(
                dot + ("gate_up_proj" if module.packed else "up_proj"),
                first,
                first + module.intermediate_size,
            )
    return found


def fold(layer: torch.nn.Module, shared: SharedInput, s: Float32) -> None:
    """Multiply the input channels of ``shared``'s linear layers by ``s``, and divide what makes them."""
    factors = torch.from_numpy(s)
    with torch.no_grad():
        for name in shared.linears:
            layer.get_submodule(name).weight.mul_(factors)
        if shared.norm is not None:
            _divide(layer.get_submodule(shared.norm), slice(None), factors)
        elif shared.rows is not None:
            rows = shared.rows
            of_rows = torch.from_numpy(rows.of_rows(s))
            _divide(layer.get_submodule(rows.linear), slice(rows.start, rows.stop), of_rows)


def _divide(module: Any, rows: slice, s: Any) -> None:
    weight = module.weight[rows]
    weight.div_(s if weight.dim() == 1 else s[:, None])
    if getattr(module, "bias", None) is not None:
        module.bias[rows].div_(s)


def clippable(layer: torch.nn.Module) -> frozenset[str]:
    """Linear layers whose ranges AWQ clips: all but queries and keys, whose errors multiply."""
    linears = {name for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
    for name, module in layer.named_modules():
        if isinstance(module, nn.Attention):
            dot = f"{name}." if name else ""
            linears -= {f"{dot}q_proj", f"{dot}k_proj", f"{dot}qkv_proj"}
    return frozenset(linears)
