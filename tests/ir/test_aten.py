"""Plain PyTorch arithmetic in a model's forward becomes ops that native kernels run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pelton import nn
from pelton.builder.calls import extract
from pelton.builder.trace import trace
from pelton.engine.batch import AttentionMetadata, InputBatch
from pelton.engine.native_plan import NativePlan
from pelton.ir.graph import op_name
from pelton.ir.tensors import HostTensor
from pelton.kernels import native
from pelton.kernels.layouts import LAYOUTS
from pelton.nn import functional as F
from tests.builder.untimed import untimed_plan
from tests.ir.graph_forward import graph_forward

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")

TOKENS = 9


class RmsNorm(nn.Module):
    """As one writes it in PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(24) + 0.5)
        self.eps = 1e-5

    def forward(self, x_TD: Any) -> Any:
        return x_TD * F.rsqrt(F.mean(x_TD * x_TD, dim=-1, keepdim=True) + self.eps) * self.weight


class Tiny(nn.CausalLM):
    """``forward`` of the embedded tokens (T, 24) -> (T, any)."""

    vocab_size, hidden_size, num_layers, max_position_embeddings = 16, 24, 0, 64

    def __init__(self, body: Callable[[Tiny, Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.table = torch.nn.Embedding(16, 24)
        self.norm = RmsNorm()
        self.inner = torch.nn.Linear(24, 24)
        self.layer_norm = torch.nn.LayerNorm(24)
        self.per_head = torch.nn.Parameter(torch.rand(3, 8) + 0.5)
        self.gain = torch.nn.Parameter(torch.rand(1) + 1)

    def layer_kv(self) -> list[nn.LayerKV]:
        return []

    def forward(self, ids: Any, positions: Any, k: Any, v: Any, groups: Any, rows: Any) -> Any:
        return F.take_rows(self.body(self, self.table(ids)), rows)


def heads(x: Any) -> Any:
    return x.view(-1, 3, 8)


BODIES: dict[str, Callable[[Any, Any], Any]] = {
    "an RMS norm in PyTorch": lambda m, x: m.norm(x),
    "the same with methods": lambda m, x: (
        x.float() * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6)
    ).type_as(x),
    "torch's layers": lambda m, x: torch.nn.functional.silu(m.inner(m.layer_norm(x))),
    "numbers": lambda m, x: (1 - x) * 2 + (x - 3) / 4 + 1 / (x * x + 1) + 2.5,
    "powers": lambda m, x: x**2 + x**3 + (x.abs() + 0.1) ** 0.5 + (x.abs() + 0.1) ** -0.5 + x.abs() ** 1.7,
    "a bound": lambda m, x: torch.clamp(x, min=-0.5, max=0.25) + x.clamp(max=0) + torch.clamp_min(x, 0.1),
    "functions": lambda m, x: torch.exp(-x) + x.sin() * x.cos() + x.tanh() + torch.sigmoid(x) + x.relu(),
    "gates": lambda m, x: torch.nn.functional.gelu(x) * torch.nn.functional.gelu(x, approximate="tanh"),
    "squared relu": lambda m, x: torch.square(torch.relu(x)),
    "quick gelu": lambda m, x: x * torch.sigmoid(1.702 * x),
    "largest and least": lambda m, x: torch.maximum(x, -x) - torch.minimum(x, m.gain),
    "a softmax": lambda m, x: torch.softmax(x, dim=-1) * x.sum(-1, keepdim=True) + x.amax(-1, keepdim=True),
    "a mean without its axis": lambda m, x: x - x.mean(dim=-1).unsqueeze(-1),
    "a weight per head": lambda m, x: (heads(x) * m.per_head).reshape(-1, 24),
    "a value per head": lambda m, x: (heads(x) / heads(x).abs().sum(-1, keepdim=True)).flatten(1),
    "a value": lambda m, x: x * m.gain + m.gain,
    "transposed heads": lambda m, x: heads(x).transpose(1, 2).reshape(-1, 24) + x,
    "transposed, then read": lambda m, x: F.activation(heads(x).transpose(1, 2), "silu").flatten(1),
    "transposed and copied": lambda m, x: heads(x).permute(0, 2, 1).contiguous().view(-1, 24),
    "every second": lambda m, x: x[:, ::2] + x[:, 1::2],
    "a repeated head": lambda m, x: heads(x)[:, :1].expand(-1, 3, 8).reshape(-1, 24) - x,
    "functional": lambda m, x: (
        F.softmax(F.exp(F.tanh(x)), dim=-1) + F.sum(F.square(F.sqrt(F.exp(x))), keepdim=True)
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_pytorch_arithmetic_runs_natively(name: str) -> None:
    with torch.no_grad():
        model = Tiny(BODIES[name])
        ids = torch.randint(0, 16, (TOKENS,), dtype=torch.int32)
        rows = torch.tensor([8, 0, 3], dtype=torch.int32)
        expected = model(ids, ids, [], [], [], rows)
        graph = trace(copy.deepcopy(model).to("meta"), max_seq_len=64)
        torch.testing.assert_close(graph_forward(graph, model)(ids, ids, [], [], [], rows), expected)
    plan = untimed_plan(extract(graph), {"T": 16, "B": 2, "N": 4})
    weights = {n: p.detach().numpy() for n, p in model.named_parameters()}
    packed = {
        b.name: LAYOUTS[b.layout].pack(HostTensor("float32", weights[b.name].shape, weights[b.name]))
        for b in plan.buffers
        if b.kind == "weight"
    }
    none = np.zeros(0, np.int32)
    group = AttentionMetadata(
        slot_mapping_T=none, block_table_BM=none, cu_seqlens=none, seq_lens_B=np.full(1, TOKENS, np.int32)
    )
    batch = InputBatch(
        input_ids_T=ids.numpy(), positions_T=ids.numpy(), groups=(group,), logits_indices_N=rows.numpy()
    )
    with_threads = NativePlan(plan, packed, [], [], threads=2, poison=True)
    logits, _ = with_threads.run(batch)
    np.testing.assert_allclose(logits, expected.numpy(), rtol=2e-5, atol=2e-6)
    with_threads.close()


def test_sums_and_products_that_fused_ops_take_stay_as_they_are() -> None:
    graph = trace(Tiny(lambda m, x: (x + x) * x * 2.0).to("meta"), max_seq_len=64)
    names = [op_name(n) for n in graph.calls]
    assert names == ["embedding", "aten.add.Tensor", "aten.mul.Tensor", "aten.mul.Tensor", "take_rows"]
