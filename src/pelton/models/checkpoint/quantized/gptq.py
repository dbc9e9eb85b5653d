"""GPTQ checkpoints as AutoGPTQ and GPTQModel write them (quant_method gptq).

Of a linear layer with K inputs and N outputs, instead of its weight (N, K):

- qweight (K bits / 32, N) int32: an output's codes down its column, lowest bits first;
- scales (groups, N);
- qzeros (groups, N bits / 32) int32: zero points along the outputs. ``gptq`` (v1) stores z - 1, subtracted
  from whole words, so that a zero point of 0 borrows from its neighbour; ``gptq_v2`` stores z;
- g_idx (K,) int32: the group of each input. With desc_act (act-order: columns quantised in order of falling
  Hessian diagonal) groups are not neighbours.

The value is ``scale (code - zero)``. Frantar et al. 2022 (GPTQ).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from pelton.models.checkpoint.quantized.settings import Settings
from pelton.models.checkpoint.quantized.stored import FLOATS, Array, StoredTensors
from pelton.models.checkpoint.quantized.weight import (
    Integers,
    IntegerWeight,
    QuantizedWeight,
    act_order,
    unpack,
)

BITS = (2, 3, 4, 8)
FORMATS = ("gptq", "gptq_v2")


def gptq_weights(settings: Settings, stored: StoredTensors) -> Iterator[QuantizedWeight]:
    """Every weight that is stored as a qweight. Raises ``CheckpointError``."""
    version = settings.choice("checkpoint_format", "format", known=FORMATS, default="gptq")
    settings.choice("pack_dtype", known=("int32",), default="int32")
    if settings.flag("is_marlin_format", False):
        raise settings.wrong("is_marlin_format", True, "supported (supported: " + ", ".join(FORMATS) + ")")
    for name in stored:
        if name.endswith(".qweight"):
            module = name.removesuffix(".qweight")
            own = Settings(settings.where, {**settings.values, **_overrides(settings, module)})
            bits = own.integer("bits", among=BITS)
            yield _weight(module, bits, own.integer("group_size", default=-1), version, own, stored)


def _overrides(settings: Settings, module: str) -> Mapping[str, Any]:
    """GPTQModel's ``dynamic``: settings of the modules that a pattern fits ("+:" or nothing before it)."""
    for key, values in settings.table("dynamic").items():
        if not key.startswith("-:") and settings.pattern("dynamic", key.removeprefix("+:")).match(module):
            if not isinstance(values, dict):
                raise settings.wrong("dynamic", values, "an object for each pattern")
            return values
    return {}


def _each(index: Array, groups: int, size: int) -> bool:
    """Whether every group is there as often as it has columns, so that ``index`` is no filler."""
    return bool(index.min() >= 0 and np.array_equal(np.bincount(index, minlength=groups), [size] * groups))


def _weight(
    module: str, bits: int, group_size: int, version: str, settings: Settings, stored: StoredTensors
) -> QuantizedWeight:
    words, rows = stored.need(f"{module}.qweight", ("int32",)).shape
    cols = words * 32 // bits
    if words * 32 % bits or rows * bits % 32:
        raise stored.wrong(
            f"has {module}.qweight of {words} x {rows}, which holds no whole number of {bits}-bit codes"
        )
    group = cols if group_size == -1 else group_size
    if group < 1 or cols % group:
        raise settings.wrong("group_size", group_size, f"-1 or a divisor of the {cols} columns of {module}")
    groups = cols // group
    stored.need(f"{module}.scales", FLOATS, (groups, rows))
    stored.need(f"{module}.qzeros", ("int32",), (groups, rows * bits // 32))
    parts = [f"{module}.{part}" for part in ("qweight", "qzeros", "scales")]
    index, whole, ordered = None, True, settings.flag("desc_act", False)
    g_idx = f"{module}.g_idx"
    if g_idx in stored:
        parts.append(g_idx)
        stored.need(g_idx, ("int32", "int64"), (cols,))
        if ordered:
            index, whole = act_order(stored.array(g_idx), group, g_idx, stored)
        elif not np.array_equal(np.sort(found := stored.array(g_idx)), found) and _each(found, groups, group):
            raise stored.wrong(f"has {g_idx} with its groups in another order, and desc_act is false")
    elif ordered and groups > 1:
        raise stored.wrong(f"has no tensor {g_idx}, which desc_act needs")

    def start() -> Callable[[slice], Integers]:
        words, z = stored.array(f"{module}.qweight"), zeros()
        d = stored.floats(f"{module}.scales")
        return lambda part: Integers(unpack(words[:, part].T, bits), d[:, part].T, z[:, part].T)

    def zeros() -> Array:
        words = stored.array(f"{module}.qzeros")
        if version == "gptq_v2":
            return unpack(words, bits)
        if bits == 3:  # codes cross words: each is one less, for itself
            return unpack(words, bits) + np.uint8(1) & np.uint8(7)
        ones = np.uint32(sum(1 << i for i in range(0, 32, bits)))
        return unpack(words.view(np.uint32) + ones, bits)

    weight = IntegerWeight(shape=(rows, cols), bits=bits, group=group, start=start, index=index, whole=whole)
    return QuantizedWeight(
        name=f"{module}.weight",
        parts=tuple(parts),
        shape=(rows, cols),
        quant=weight.quant,
        read=weight.read,
        order=weight.order,
    )
