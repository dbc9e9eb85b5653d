"""The verifier names the first node that a plan could not run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pelton import nn
from pelton.builder.trace import trace
from pelton.errors import BuildError
from pelton.nn import functional as F


def tiny(forward: Any) -> nn.CausalLM:
    """A model whose forward is ``forward(self, embedded (T, 8), rows)``."""

    class Tiny(nn.CausalLM):
        vocab_size, hidden_size, num_layers, max_position_embeddings = 8, 8, 0, 64

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 8)
            self.inner = nn.Linear(8, 8)

        def layer_kv(self) -> list[nn.LayerKV]:
            return []

        def forward(self, ids: Any, positions: Any, k: Any, v: Any, groups: Any, rows: Any) -> Any:
            return forward(self, self.embed(ids), rows)

    return Tiny()


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (
            lambda m, x, rows: F.take_rows(torch.erf(x), rows),
            r"node erf \(aten.erf.default\) is not an op",
        ),
        (lambda m, x, rows: F.take_rows(x, rows + 1), "node add .*takes the number 1 with torch.int32"),
        (lambda m, x, rows: F.take_rows(x.double(), rows), "is not an op"),
        (lambda m, x, rows: F.take_rows(x.transpose(0, 1), rows), "dynamic dimension that is not the first"),
        (lambda m, x, rows: F.take_rows(x.mean(0, keepdim=True), rows), r"mean.dim\) is not an op"),
        (lambda m, x, rows: F.take_rows(x.t() @ x, rows), "is not an op that a plan can run"),
        (lambda m, x, rows: m.inner(x), r"is the result and must be float32 \(N, V\), not .*'T'"),
        (lambda m, x, rows: F.take_rows(torch.add(x, x, alpha=2), rows), "has alpha; multiply first"),
        (lambda m, x, rows: F.take_rows(x.view(-1), rows), "could not be traced"),
        (lambda m, x, rows: F.take_rows(x if x.sum() > 0 else -x, rows), "could not be traced"),
        (lambda m, x, rows: F.take_rows(x if x.shape[0] > 5 else x + x, rows), "could not be traced"),
    ],
)
def test_what_a_plan_cannot_run_is_named(forward: Any, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        trace(tiny(forward), max_seq_len=64)


def test_what_a_plan_can_run_passes() -> None:
    def forward(m: Any, x: Any, rows: Any) -> Any:
        gate, up = m.inner(x).split(4, dim=-1)
        wide = F.gated_activation(gate, up, "silu").unsqueeze(1).squeeze(1)
        return F.take_rows(wide[:, 1:3] * 2.0 + wide[:, :2], rows)

    graph = trace(tiny(forward), max_seq_len=64)
    assert graph.type_of(graph.logits).shape == ("N", 2)
