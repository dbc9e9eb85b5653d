"""Which decoder layer an instruction belongs to, and which instructions are alike but for the layer."""

from __future__ import annotations

import itertools
import re

from pelton.engine.plan import Plan

_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")


def layer_of_name(name: str) -> int | None:
    """The layer that a traced name is in: 3 for ``model.layers.3.mlp.up_proj.linear``."""
    found = _NUMBER.search(name.rpartition(".")[0] + ".")
    return int(found.group()) if found else None


def without_layer(name: str) -> str:
    """``name`` with its layer's number replaced, so that equal places of layers read alike."""
    head, dot, last = name.rpartition(".")
    return _NUMBER.sub("N", head + dot, count=1) + last


def instruction_layers(plan: Plan) -> list[int | None]:
    """The layer of each instruction: what its name says, else its weights or caches, else the layer that
    the instructions on both sides of it are in; None before the first layer and after the last."""
    found: list[int | None] = []
    for instruction in plan.instructions:
        layer = layer_of_name(instruction.name)
        for index in instruction.inputs:
            if layer is not None or index < 0:
                continue
            buffer = plan.buffers[plan.operands[index].buffer]
            if buffer.kind in ("weight", "constant"):
                layer = layer_of_name(buffer.name)
            elif buffer.layer >= 0:
                layer = buffer.layer
        found.append(layer)
    return _between(found)


def _between(layers: list[int | None]) -> list[int | None]:
    filled, known = list(layers), [i for i, layer in enumerate(layers) if layer is not None]
    for before, after in itertools.pairwise(known):
        if layers[before] == layers[after]:
            filled[before + 1 : after] = [layers[before]] * (after - before - 1)
    return filled
