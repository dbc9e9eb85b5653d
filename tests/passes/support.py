"""Models, graphs and contexts that the tests of passes share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pelton import nn
from pelton.builder.trace import trace
from pelton.ir.evaluate import evaluate
from pelton.ir.graph import Graph, op_name
from pelton.ir.printer import recipe_text
from pelton.ir.recipe import Recipe, Rows
from pelton.ir.tensors import HostTensor
from pelton.ir.verifier import verify
from pelton.models.registry import create_model
from pelton.passes import Pass, PassContext, PassReport
from tests.ir.graph_forward import graph_forward
from tests.models.oracle import hf_config_dict, read_from, texts
from tests.models.paged import PagedRunner, int32, run_packed


def _noise(recipe: Recipe) -> HostTensor:
    """Different values for every recipe."""
    rng = np.random.default_rng(list(recipe_text(recipe).encode()))
    rows = recipe.stop - recipe.start if isinstance(recipe, Rows) else 4
    return HostTensor("float32", (rows, 4), rng.standard_normal((rows, 4), dtype=np.float32))


#: Ops for which only GPUs have kernels.
GPU_OPS = ("linear_add", "norm_linear", "norm_linear_gated")
ANY_KERNEL = PassContext(quant_of=lambda _: "float32", read=_noise)
FLOAT32 = replace(ANY_KERNEL, has_tactic=lambda spec: spec.op not in GPU_OPS)
"""A CPU's."""


def create(hf: Any, **changes: Any) -> nn.CausalLM:
    """Our model of ``hf``'s configuration, on the meta device."""
    return create_model(hf_config_dict(hf, **changes), max_seq_len=64)


def logits(model: nn.CausalLM, graph: Graph | None = None) -> torch.Tensor:
    """Of a mix of prefill, chunked prefill and decode."""
    forward = graph_forward(graph, model) if graph else None
    return torch.cat(run_packed(PagedRunner(model, forward=forward), texts((14, 9))))


def ops(graph: Graph) -> list[str]:
    return [op_name(n) for n in graph.calls]


def by_name(reports: list[PassReport]) -> dict[str, PassReport]:
    return {r.name: r for r in reports}


def as_pass(run: Callable[..., PassReport], **fields: Any) -> Pass:
    return Pass(**{"name": run.__name__, "kind": "graph", "run": run, "rewrite": "", "bound": "", **fields})


class Net(nn.CausalLM):
    """A network without layers: ``body(self, ids_T, positions_T)`` gives (T, 32) from ``parts``."""

    vocab_size, hidden_size, num_layers, max_position_embeddings = 32, 32, 0, 64

    def __init__(self, body: Callable[..., Any], **parts: torch.nn.Module) -> None:
        super().__init__()
        self.body = body
        self.embed = nn.Embedding(32, 32)
        for name, part in parts.items():
            setattr(self, name, part)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator) * 0.3 + (parameter.dim() == 1)
                )

    def layer_kv(self) -> list[nn.LayerKV]:
        return []

    def forward(self, ids: Any, positions: Any, k: Any, v: Any, groups: Any, rows: Any) -> Any:
        return nn.functional.take_rows(self.body(self, ids, positions), rows)

    def read(self, name: str) -> HostTensor:
        """The model's own weights as a checkpoint."""
        return read_from(dict(self.named_parameters()))(name)

    def context(self, **fields: Any) -> PassContext:
        read = lambda recipe: evaluate(recipe, self.read)
        return PassContext(**{"quant_of": lambda _: "float32", "read": read, **fields})

    def arguments(self, tokens: int) -> tuple[Any, ...]:
        """``forward``'s arguments of a step of so many tokens, every row wanted."""
        generator = torch.Generator().manual_seed(tokens)
        ids = torch.randint(0, 32, (tokens,), generator=generator, dtype=torch.int32)
        return ids, int32(range(tokens)), [], [], [], int32(range(tokens))


def check_same(net: Net, graph: Graph, tolerance: float = 0.0) -> None:
    """The graph is valid and gives the model's results at sizes it was not traced at."""
    graph.module.recompile()
    verify(graph)
    forward = graph_forward(graph, net, net.read)
    for tokens in (1, 2, 17):
        arguments = net.arguments(tokens)
        want, got = net(*arguments), forward(*arguments)
        error = float((got - want).abs().max() / want.abs().max())
        assert error <= tolerance, f"{tokens} tokens: {error:.2g}"


def traced(net: Net) -> Graph:
    return trace(net, max_seq_len=64)
