"""A graph as the ``forward`` of the model it was traced from."""

from __future__ import annotations

from typing import Any

import torch

from pelton import nn
from pelton.ir.graph import Graph


def graph_forward(graph: Graph, model: nn.CausalLM) -> Any:
    """``forward`` of ``model`` computed by ``graph`` with the model's parameters."""

    def forward(ids: Any, positions: Any, k: Any, v: Any, groups: Any, rows: Any) -> torch.Tensor:
        arguments = dict(model.named_parameters())
        arguments |= {"input_ids": ids, "positions": positions, "logits_indices": rows}
        for layer in range(model.num_layers):
            arguments |= {f"k_cache.{layer}": k[layer], f"v_cache.{layer}": v[layer]}
        for g, group in enumerate(groups):
            arguments |= {f"slot_mapping.{g}": group.slot_mapping_T, f"block_table.{g}": group.block_table_BM}
            arguments |= {"cu_seqlens": group.cu_seqlens, "seq_lens": group.seq_lens_B}
        return graph.run(arguments)

    return forward
