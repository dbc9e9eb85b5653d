"""From a model's own ``forward`` to an ``ir.Graph``.

``forward`` runs on meta tensors, so nothing is computed or allocated, and a ``Recorder`` notes the ops.
Dynamic dimensions are plain numbers while it runs, recognised afterwards (``builder.sizes``): ``forward``
is recorded at several sizes of a step, and what is not the same each time is refused. The result is not
functionalised: KV writes stay where the model put them.

``torch.export`` gives the same graphs from symbolic shapes, and takes ten times as long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import fx

from pelton import nn
from pelton.builder.recorder import Recorder
from pelton.builder.sizes import DependsOnSizes, Sizes, example_sizes, generalise
from pelton.errors import BuildError
from pelton.ir.graph import Graph, op_name
from pelton.ir.types import Dim, GraphInput
from pelton.ir.verifier import verify
from pelton.nn import functional as F


def trace(
    model: nn.CausalLM,
    *,
    max_seq_len: int,
    block_size: int = 16,
    kv_dtype: str = "float32",
    dtype: str = "float32",
) -> Graph:
    """The model's graph; ``model`` may be on the meta device.

    Block tables get ``ceil(max_seq_len / block_size)`` columns; caches hold ``kv_dtype``; the network
    computes in ``dtype``, and its logits are float32. Raises
    ``BuildError`` when ``forward`` does what a plan cannot (control flow that depends on values or on
    the step's sizes, an op that is not allowed).
    """
    step = _Step(
        model,
        math.ceil(max_seq_len / block_size),
        block_size,
        getattr(torch, kv_dtype),
        getattr(torch, dtype),
    )
    largest = max((math.prod(p.shape) for p in model.parameters()), default=0)
    main, *others = example_sizes(step.dims(), largest)
    graph = _graph(model, step, main)
    verify(graph)
    recordings = [(main, graph.calls)]
    for sizes in others:
        nodes = _run(model, step, sizes).graph.nodes
        recordings.append((sizes, tuple(n for n in nodes if n.op == "call_function")))
    try:
        generalise(recordings)
    except DependsOnSizes as error:
        _refuse(model, str(error), error)
    for node in reversed(graph.calls):
        if op_name(node) == "getitem" and not node.users:
            graph.erase(node)
    graph.module.recompile()
    return graph


class _Step:
    """The arguments of ``forward``: what each tensor is, and its shape with named dimensions."""

    def __init__(self, model: nn.CausalLM, columns: int, block_size: int, kv_dtype: Any, dtype: Any) -> None:
        self.dtype = dtype
        self._layouts, self._group_of = model.kv_groups(), model.group_of_layer()
        self.inputs: dict[GraphInput, tuple[tuple[Dim, ...], Any]] = {}
        self._vector("input_ids", "T")
        self._vector("positions", "T")
        for kind in ("k_cache", "v_cache"):
            for layer, g in enumerate(self._group_of):
                what = GraphInput(kind=kind, name=f"{kind}.{layer}", layer=layer, group=g)  # type: ignore[arg-type]
                shape = (f"P{g}", self._layouts[g].num_kv_heads, block_size, self._layouts[g].head_dim)
                self.inputs[what] = (shape, kv_dtype)
        for g in range(len(self._layouts)):
            self._vector(f"slot_mapping.{g}", "T")
            self._vector(f"block_table.{g}", "B", columns)
        if self._layouts:
            # The same in every group (step contract): one plan input each, whichever group reads it.
            self._vector("cu_seqlens", "B+1")
            self._vector("seq_lens", "B")
        self._vector("logits_indices", "N")

    def _vector(self, name: str, *shape: Dim) -> None:
        self.inputs[GraphInput(kind="input", name=name)] = (shape, torch.int32)

    def dims(self) -> tuple[str, ...]:
        return ("T", "B", "B+1", "N", *(f"P{g}" for g in range(len(self._layouts))))

    def arguments(self, tensors: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments of ``forward`` from tensors by name."""
        layers, groups = range(len(self._group_of)), range(len(self._layouts))
        return (
            tensors["input_ids"],
            tensors["positions"],
            [tensors[f"k_cache.{layer}"] for layer in layers],
            [tensors[f"v_cache.{layer}"] for layer in layers],
            [
                nn.AttentionInputs(
                    tensors[f"slot_mapping.{g}"],
                    tensors[f"block_table.{g}"],
                    tensors["cu_seqlens"],
                    tensors["seq_lens"],
                )
                for g in groups
            ],
            tensors["logits_indices"],
        )


def _run(model: nn.CausalLM, step: _Step, sizes: Sizes) -> Recorder:
    """``forward`` once; placeholders are the step's inputs, then parameters, then buffers."""
    recorder = Recorder()

    def meta(name: str, shape: Iterable[Dim], dtype: Any) -> Any:
        concrete = [sizes[s] if isinstance(s, str) else s for s in shape]
        tensor = torch.empty(concrete, dtype=dtype, device="meta")
        recorder.placeholder(name, tensor)
        return tensor

    try:
        with torch.inference_mode():
            arguments = {i.name: meta(i.name, *described) for i, described in step.inputs.items()}
            own = {n: meta(n, p.shape, step.dtype) for n, p in model.named_parameters()}
            own |= {n: meta(n, b.shape, b.dtype) for n, b in model.named_buffers()}
            with recorder.modules_of(model), recorder:
                logits = torch.func.functional_call(model, own, step.arguments(arguments))
                if logits.dtype != torch.float32:
                    logits = F.to_float32(logits)
            recorder.result(logits)
    except Exception as error:
        _refuse(model, _reason(error), error)
    return recorder


def _graph(model: nn.CausalLM, step: _Step, sizes: Sizes) -> Graph:
    recorder = _run(model, step, sizes)
    placeholders = [n for n in recorder.graph.nodes if n.op == "placeholder"]
    described = list(step.inputs)
    described += [GraphInput(kind="weight", name=name) for name, _ in model.named_parameters()]
    described += [GraphInput(kind="constant", name=name) for name, _ in model.named_buffers()]
    inputs, constants = {}, {}
    for node, what in zip(placeholders, described, strict=True):
        if what.kind in ("weight", "constant") and not node.users:
            recorder.graph.erase_node(node)
            continue
        inputs[node.name] = what
        if what.kind == "constant":
            value = constants[what.name] = model.get_buffer(what.name)
            if value.is_meta:
                _refuse(model, f"the buffer {what.name} has no values; give it some when it is made")
    module = fx.GraphModule(torch.nn.Module(), recorder.graph)
    dims = {size: name for name, size in sizes.items()}
    return Graph(module, inputs, dims, constants, nn.collect_recipes(model))


def _reason(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _refuse(model: nn.CausalLM, reason: str, error: Exception | None = None) -> NoReturn:
    raise BuildError(
        f"{type(model).__name__} could not be traced: {reason} (forward must not branch on values or "
        "on the number of tokens or sequences; docs/adding-a-model.md says what it may do)"
    ) from error
