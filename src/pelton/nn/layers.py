"""Layers without state: projections, norms, embeddings and feed-forward blocks."""

from __future__ import annotations

from typing import Any

import torch

from pelton.ir.recipe import Recipe, add_scalar
from pelton.nn import functional as F
from pelton.nn.module import Module


def parameter(*shape: int) -> Any:
    """An uninitialised inference parameter on the current default device (``meta`` at build)."""
    return torch.nn.Parameter(torch.empty(*shape), requires_grad=False)


class Linear(Module):
    """``y = x @ weight.T (+ bias)``: weight (out_features, in_features)."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = parameter(out_features, in_features)
        self.bias = parameter(out_features) if bias else None

    def forward(self, x_TD: Any) -> Any:
        return F.linear(x_TD, self.weight, self.bias)


class Embedding(Module):
    """Rows of a (num_embeddings, dim) table."""

    def __init__(self, num_embeddings: int, dim: int) -> None:
        super().__init__()
        self.weight = parameter(num_embeddings, dim)

    def forward(self, ids_T: Any) -> Any:
        return F.embedding(ids_T, self.weight)


class RMSNorm(Module):
    """Root-mean-square norm over the last axis.

    ``stored_offset`` is what the checkpoint leaves out of the weight: Gemma stores ``weight - 1``,
    so its norms pass 1.0 and the recipe adds it back.
    """

    def __init__(self, dim: int, *, eps: float, stored_offset: float = 0.0) -> None:
        super().__init__()
        self.weight = parameter(dim)
        self.eps = eps
        self.stored_offset = stored_offset

    def recipe(self, param_name: str, source: Recipe) -> Recipe:
        return add_scalar(source, self.stored_offset)

    def forward(self, x: Any) -> Any:
        return F.rms_norm(x, self.weight, self.eps)


class LayerNorm(Module):
    """Layer norm over the last axis, with weight and bias."""

    def __init__(self, dim: int, *, eps: float) -> None:
        super().__init__()
        self.weight = parameter(dim)
        self.bias = parameter(dim)
        self.eps = eps

    def forward(self, x_TD: Any) -> Any:
        return F.layer_norm(x_TD, self.weight, self.bias, self.eps)


class GatedMLP(Module):
    """``down(act(gate(x)) * up(x))`` (SwiGLU, GeGLU: Shazeer, 2020).

    ``packed``: the checkpoint (Phi-3), or the pass ``fuse_gate_mlp``, stacks gate and up in one
    projection ``gate_up_proj`` of 2 * intermediate_size rows, gate first.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str,
        bias: bool = False,
        packed: bool = False,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.intermediate_size = intermediate_size
        self.packed = packed
        if packed:
            self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, bias=bias)
        else:
            self.gate_proj = Linear(hidden_size, intermediate_size, bias=bias)
            self.up_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x_TD: Any) -> Any:
        if self.packed:
            gate, up = self.gate_up_proj(x_TD).split(self.intermediate_size, dim=-1)
        else:
            gate, up = self.gate_proj(x_TD), self.up_proj(x_TD)
        return self.down_proj(F.gated_activation(gate, up, self.activation))


class MLP(Module):
    """``c_proj(act(c_fc(x)))``, two layers with the names GPT-2 gives them."""

    def __init__(self, c_fc: Linear, c_proj: Linear, *, activation: str) -> None:
        super().__init__()
        self.c_fc = c_fc
        self.c_proj = c_proj
        self.activation = activation

    def forward(self, x_TD: Any) -> Any:
        return self.c_proj(F.activation(self.c_fc(x_TD), self.activation))
