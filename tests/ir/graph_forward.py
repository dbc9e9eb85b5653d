"""A graph as the ``forward`` of the model it was traced from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pelton import nn
from pelton.ir.blocks import dequantize
from pelton.ir.evaluate import evaluate
from pelton.ir.graph import Graph
from pelton.ir.tensors import HostTensor


def graph_forward(graph: Graph, model: nn.CausalLM, read: Callable[[str], HostTensor] | None = None) -> Any:
    """``forward`` of ``model`` computed by ``graph``: with the model's parameters, or with the weights that
    the graph's recipes give over what ``read`` reads, as an engine has them."""
    if read is None:
        own = nn.collect_recipes(model)
        assert all(own[name] == graph.recipes[name] for name in graph.weights()), "a recipe was rewritten"
        weights = dict(model.named_parameters())
    else:
        weights = {n: torch.from_numpy(dequantize(evaluate(graph.recipes[n], read))) for n in graph.weights()}

    def forward(ids: Any, positions: Any, k: Any, v: Any, groups: Any, rows: Any) -> torch.Tensor:
        arguments = dict(weights)
        arguments |= {"input_ids": ids, "positions": positions, "logits_indices": rows}
        for layer in range(model.num_layers):
            arguments |= {f"k_cache.{layer}": k[layer], f"v_cache.{layer}": v[layer]}
        for g, group in enumerate(groups):
            arguments |= {f"slot_mapping.{g}": group.slot_mapping_T, f"block_table.{g}": group.block_table_BM}
            arguments |= {"cu_seqlens": group.cu_seqlens, "seq_lens": group.seq_lens_B}
        return graph.run(arguments)

    return forward
