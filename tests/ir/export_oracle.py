"""The graph of a model by ``torch.export`` and its symbolic shapes: an oracle for our own tracing."""

from __future__ import annotations

import math
from typing import Any

import torch

from pelton import nn
from pelton.ir.graph import Graph, meta_call
from pelton.ir.types import GraphInput

SIZES = {"T": 1000003, "B": 1000033, "B+1": 1000037, "N": 1000039, "P0": 1000081, "P1": 1000099}
"""Distinct primes, larger than any size of a tiny model."""


def export(model: nn.CausalLM, *, max_seq_len: int, block_size: int, kv_dtype: str = "float32") -> Graph:
    """As ``builder.trace.trace``."""
    layouts, group_of = model.kv_groups(), model.group_of_layer()
    columns = math.ceil(max_seq_len / block_size)
    dims = {name: torch.export.Dim(name.replace("+", "_plus_"), min=2) for name in SIZES}
    described: list[GraphInput] = []

    def tensor(kind: Any, name: str, shape: tuple[Any, ...], layer: int = -1) -> tuple[Any, Any]:
        group = group_of[layer] if layer >= 0 else -1
        described.append(GraphInput(kind=kind, name=name, layer=layer, group=group))
        dtype = torch.int32 if layer < 0 else getattr(torch, kv_dtype)
        sizes = [SIZES[s] if isinstance(s, str) else s for s in shape]
        return torch.empty(sizes, dtype=dtype, device="meta"), {0: dims[shape[0]]}

    def cache(kind: str, layer: int) -> tuple[Any, Any]:
        g = group_of[layer]
        shape = (f"P{g}", layouts[g].num_kv_heads, block_size, layouts[g].head_dim)
        return tensor(kind, f"{kind}.{layer}", shape, layer)

    ids, positions = tensor("input", "input_ids", ("T",)), tensor("input", "positions", ("T",))
    k_caches = [cache("k_cache", layer) for layer in range(model.num_layers)]
    v_caches = [cache("v_cache", layer) for layer in range(model.num_layers)]
    groups = [
        (
            tensor("input", f"slot_mapping.{g}", ("T",)),
            tensor("input", f"block_table.{g}", ("B", columns)),
            tensor("input", "cu_seqlens", ("B+1",)),
            tensor("input", "seq_lens", ("B",)),
        )
        for g in range(len(layouts))
    ]
    rows = tensor("input", "logits_indices", ("N",))

    def pick(i: int) -> tuple[Any, ...]:
        caches = ([c[i] for c in k_caches], [c[i] for c in v_caches])
        per_group = [nn.AttentionInputs(*(part[i] for part in group)) for group in groups]
        return (ids[i], positions[i], *caches, per_group, rows[i])

    with torch.no_grad():
        program = torch.export.export(model, pick(0), dynamic_shapes=pick(1), strict=False)
    return _graph(program, model, described)


def _graph(program: Any, model: nn.CausalLM, described: list[GraphInput]) -> Graph:
    graph = program.graph_module.graph
    canonical = {id(p): name for name, p in model.named_parameters()}
    kinds, step = torch.export.graph_signature.InputKind, iter(described)
    inputs: dict[str, GraphInput] = {}
    first: dict[GraphInput, Any] = {}
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.kind is kinds.PARAMETER:
            what = GraphInput(kind="weight", name=canonical[id(model.get_parameter(spec.target))])
        else:
            user = spec.kind is kinds.USER_INPUT
            what = next(step) if user else GraphInput(kind="constant", name=spec.target)
        kept = first.setdefault(what, node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)
        else:
            inputs[node.name] = what
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack")
        where = str(list(stack.values())[-1][0]) if stack else ""
        if node.op == "placeholder":
            fake = node.meta["val"]
            sizes = [int(size) for size in fake.shape]
            value = torch.empty(sizes, dtype=fake.dtype, device="meta")
        elif node.op == "call_function":
            value = meta_call(node.target, *torch.fx.node.map_arg((node.args, node.kwargs), _value))
        node.meta = {"val": value, "where": where}
    constants = {i.name: model.get_buffer(i.name) for i in inputs.values() if i.kind == "constant"}
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    return Graph(
        module, inputs, {size: name for name, size in SIZES.items()}, constants, nn.collect_recipes(model)
    )


def _value(node: Any) -> Any:
    return node.meta["val"]
