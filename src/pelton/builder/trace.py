"""From a model's own ``forward`` to an ``ir.Graph``, through ``torch.export``.

The step's inputs are fake, so nothing is computed or allocated. Every dynamic dimension gets its
own symbol and an example size that no other dimension has: two dimensions are never taken for one
another, and 0 and 1 are never specialised. The result is not functionalised: KV writes stay where
the model put them.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from pelton import nn
from pelton.errors import BuildError
from pelton.ir.graph import Graph
from pelton.ir.types import GraphInput
from pelton.ir.verifier import verify

#: Example sizes: distinct, and at least 2 so that none is specialised.
_EXAMPLES = {"T": 97, "B": 11, "B+1": 12, "N": 7}
_FIRST_BLOCKS = 131


def trace(model: nn.CausalLM, *, max_seq_len: int, block_size: int = 16, kv_dtype: str = "float32") -> Graph:
    """The model's graph; ``model`` may be on the meta device.

    Block tables get ``ceil(max_seq_len / block_size)`` columns; caches hold ``kv_dtype``. Raises
    ``BuildError`` when ``forward`` does what a plan cannot (data-dependent control flow, an op that
    is not allowed).
    """
    columns = math.ceil(max_seq_len / block_size)
    arguments, dynamic, described = _step_inputs(model, columns, block_size, getattr(torch, kv_dtype))
    try:
        with torch.no_grad():
            program = torch.export.export(model, arguments, dynamic_shapes=dynamic, strict=False)
    except Exception as error:
        reason = next(
            (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
        )
        raise BuildError(
            f"{type(model).__name__} could not be traced: {reason} (forward must not branch on values or "
            "on the number of tokens or sequences; docs/adding-a-model.md says what it may do)"
        ) from error
    graph = _wrap(program, model, described)
    verify(graph)
    return graph


def _step_inputs(
    model: nn.CausalLM, columns: int, block_size: int, kv_dtype: Any
) -> tuple[tuple[Any, ...], tuple[Any, ...], list[tuple[GraphInput, tuple[Any, ...]]]]:
    """Example arguments of ``forward``, their dynamic dimensions, and what each one is (flattened)."""
    dims = {name: torch.export.Dim(_identifier(name), min=2) for name in _EXAMPLES}
    sizes = dict(_EXAMPLES)
    layouts, group_of = model.kv_groups(), model.group_of_layer()
    for g in range(len(layouts)):
        sizes[f"P{g}"] = _FIRST_BLOCKS + g
        dims[f"P{g}"] = torch.export.Dim(f"P{g}", min=2)
    described: list[tuple[GraphInput, tuple[Any, ...]]] = []

    def make(what: GraphInput, *shape: Any, dtype: Any = torch.int32) -> tuple[Any, Any]:
        described.append((what, shape))
        concrete = [sizes[s] if isinstance(s, str) else s for s in shape]
        return torch.empty(concrete, dtype=dtype, device="meta"), {0: dims[shape[0]]}

    def step_input(name: str, *shape: Any) -> tuple[Any, Any]:
        return make(GraphInput(kind="input", name=name), *shape)

    def cache(kind: Any, layer: int) -> tuple[Any, Any]:
        g = group_of[layer]
        what = GraphInput(kind=kind, name=f"{kind}.{layer}", layer=layer, group=g)
        shape = (f"P{g}", layouts[g].num_kv_heads, block_size, layouts[g].head_dim)
        return make(what, *shape, dtype=kv_dtype)

    ids = step_input("input_ids", "T")
    positions = step_input("positions", "T")
    k_caches = [cache("k_cache", layer) for layer in range(model.num_layers)]
    v_caches = [cache("v_cache", layer) for layer in range(model.num_layers)]
    groups = [
        (
            step_input(f"slot_mapping.{g}", "T"),
            step_input(f"block_table.{g}", "B", columns),
            # The same in every group (step contract): one plan input each, whichever group reads it.
            step_input("cu_seqlens", "B+1"),
            step_input("seq_lens", "B"),
        )
        for g in range(len(layouts))
    ]
    logits_indices = step_input("logits_indices", "N")

    def pick(i: int) -> tuple[Any, ...]:
        return (
            ids[i],
            positions[i],
            [c[i] for c in k_caches],
            [c[i] for c in v_caches],
            [nn.AttentionInputs(*(part[i] for part in group)) for group in groups],
            logits_indices[i],
        )

    return pick(0), pick(1), described


def _wrap(program: Any, model: nn.CausalLM, described: list[tuple[GraphInput, tuple[Any, ...]]]) -> Graph:
    """Name the placeholders and symbols; drop what is unused; merge inputs that are one thing."""
    module = program.graph_module
    canonical = {id(p): name for name, p in model.named_parameters()}
    step = iter(described)
    inputs: dict[str, GraphInput] = {}
    symbols: dict[str, str] = {}
    constants: dict[str, torch.Tensor] = {}
    first: dict[GraphInput, Any] = {}
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.kind is torch.export.graph_signature.InputKind.PARAMETER:
            # A tied parameter is one weight under its first name.
            what = GraphInput(kind="weight", name=canonical[id(model.get_parameter(spec.target))])
        elif spec.kind is torch.export.graph_signature.InputKind.USER_INPUT:
            what, shape = next(step)
            symbols[str(node.meta["val"].shape[0])] = shape[0]
        else:
            value = model.get_buffer(spec.target) if spec.target in dict(model.named_buffers()) else None
            if value is None or value.is_meta:
                raise BuildError(
                    f"{type(model).__name__}: {spec.target} is a tensor made in forward or without values; "
                    "make it a parameter, or a buffer with values"
                )
            what = GraphInput(kind="constant", name=spec.target)
            constants[spec.target] = value
        kept = first.setdefault(what, node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            module.graph.erase_node(node)
        else:
            inputs[node.name] = what
    for node in placeholders:
        if node.name in inputs and not node.users and inputs[node.name].kind in ("weight", "constant"):
            del inputs[node.name]
            module.graph.erase_node(node)
    for node in module.graph.nodes:
        node.meta = {"val": node.meta.get("val"), "where": _module_path(node)}
    plain = torch.fx.GraphModule(torch.nn.Module(), module.graph)
    return Graph(plain, inputs, symbols, constants)


def _module_path(node: Any) -> str:
    """Name of the submodule whose forward made the node, such as ``model.layers.3.mlp``."""
    stack = node.meta.get("nn_module_stack")
    return str(list(stack.values())[-1][0]) if stack else ""


def _identifier(name: str) -> str:
    return name.replace("+", "_plus_")
