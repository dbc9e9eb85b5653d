"""What a ``transformers`` module computes, as a graph of ATen ops over one sequence (1, T).

The module runs once on meta tensors under ``make_fx``, before composite ops are decomposed: a linear
layer stays one node. T and N are primes larger than any other size, so they are known wherever they
appear.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx

from pelton.errors import CheckpointError
from pelton.models.transformers_import import attention
from pelton.models.transformers_import.attention import NotImportable
from pelton.models.transformers_import.skeleton import first_line

TOKENS = 1_000_003
"""T while a module is captured."""
ROWS = 999_983
"""N: rows of logits."""


@dataclass(frozen=True, kw_only=True)
class Captured:
    """The graph and what its ``get_attr`` nodes stand for."""

    graph: fx.Graph
    """Placeholders are input_ids (1, T), position_ids (1, T), attention_mask (1, T) and logits_indices
    (N); the output is (1, N, V), or (1, T, V) where the module computes all logits."""
    weights: Mapping[str, str]
    """Name in the checkpoint, by ``get_attr`` target."""
    constants: Mapping[str, Any]
    """Values (a CPU tensor), by ``get_attr`` target."""


def capture(model: Any, num_layers: int, max_seq_len: int) -> Captured:
    """Run ``model`` (``skeleton.make``) once. Raises ``CheckpointError`` naming what it does that a graph
    cannot hold, and unless each layer calls attention once."""
    name = type(model).__name__
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" not in parameters:
        raise CheckpointError(f"{name} takes no position_ids, so it cannot run on packed sequences")
    where = _names(model)
    originals = _move_buffers(model)
    calls: list[Any] = []
    tokens = attention.LENGTH.set(max_seq_len), attention.CALLS.set(calls)
    try:
        with torch.no_grad(), _paths(model), traceback.preserve_node_meta():
            module = make_fx(_Step(model, "logits_to_keep" in parameters), pre_dispatch=True)(
                *(torch.empty((1, TOKENS), dtype=torch.int64, device="meta") for _ in range(3)),
                torch.empty((ROWS,), dtype=torch.int64, device="meta"),
            )
    except NotImportable as error:
        raise CheckpointError(f"{name} {error}, so it cannot be imported") from error
    except Exception as error:
        raise CheckpointError(
            f"{name} cannot be traced, so it cannot be imported: {first_line(error)}"
        ) from error
    finally:
        attention.LENGTH.reset(tokens[0])
        attention.CALLS.reset(tokens[1])
        for owner, key, values in originals.values():
            owner._buffers[key] = values
    if len(calls) != num_layers:
        raise CheckpointError(
            f"{name} calls attention {len(calls)} times for its {num_layers} layers, "
            "so it cannot be imported: each layer must attend once, through transformers' attention interface"
        )
    weights, constants = {}, {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            tensor = getattr(module, node.target)
            if id(tensor) in where:
                weights[node.target] = where[id(tensor)]
            elif id(tensor) in originals:
                constants[node.target] = originals[id(tensor)][2]
            elif not tensor.is_meta:
                constants[node.target] = tensor
    return Captured(graph=module.graph, weights=weights, constants=constants)


class _Step(torch.nn.Module):
    def __init__(self, model: Any, takes_rows: bool) -> None:
        super().__init__()
        self.model = model
        self.takes_rows = takes_rows

    def forward(self, ids: Any, positions: Any, mask: Any, rows: Any) -> Any:
        more = {"logits_to_keep": rows} if self.takes_rows else {}
        # A mask without padding, since without one transformers looks for packed sequences itself.
        found = self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=False,
            return_dict=True,
            **more,
        )
        return found.logits


def _names(model: Any) -> dict[int, str]:
    """Name in the checkpoint of each tensor without values, by identity; tied ones have their first."""
    names: dict[int, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta and id(tensor) not in names:
            names[id(tensor)] = name
    return names


def _move_buffers(model: Any) -> dict[int, tuple[Any, str, Any]]:
    """Put meta tensors for buffers with values: (module, name, values) by the identity of each."""
    moved = {}
    for module in model.modules():
        for key, values in module._buffers.items():
            if values is not None and not values.is_meta:
                module._buffers[key] = values.to("meta")
                moved[id(module._buffers[key])] = (module, key, values)
    return moved


@contextmanager
def _paths(model: Any) -> Iterator[None]:
    """Within, nodes remember the submodule that runs: ``where`` of ``node.meta["custom"]``."""
    handles, entered = [], []

    def enter(name: str) -> None:
        entered.append(traceback.annotate({"where": name}))
        entered[-1].__enter__()

    def leave() -> None:
        entered.pop().__exit__(None, None, None)

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: enter(name)))
        handles.append(module.register_forward_hook(lambda *_: leave()))
    try:
        yield
    finally:
        while entered:
            leave()
        for handle in handles:
            handle.remove()
