"""A graph as the ``forward`` of the model it was traced from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pelton import nn
from pelton.ir.blocks import dequantize
from pelton.ir.evaluate import evaluate
from pelton.ir.graph import Graph
from pelton.ir.recipe import Source
from pelton.ir.tensors import HostTensor


def graph_forward(graph: Graph, model: nn.CausalLM, read: Callable[[str], HostTensor] | None = None) -> Any:
    """``forward`` of ``model`` computed by ``graph``, with the weights that the graph's recipes give over
    what ``read`` reads, as an engine has them. Without ``read``: with the model's own parameters; where a
    pass rewrote a recipe, they stand for the checkpoint's tensors, if they are just those."""
    own = nn.collect_recipes(model)
    if read is None and all(own.get(name) == graph.recipes[name] for name in graph.weights()):
        weights = dict(model.named_parameters())
    else:
        if read is None:
            plain = all(recipe == Source(name) for name, recipe in own.items())
            assert plain, "recipes were rewritten: say what to read"
            parameters = dict(model.named_parameters())
            read = lambda name: HostTensor("float32", tuple(parameters[name].shape), parameters[name].numpy())
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
