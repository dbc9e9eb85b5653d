"""compressed-tensors checkpoints, as llm-compressor writes them (quant_method compressed-tensors).

``config_groups`` say how the modules that a group targets (by class, name or "re:" pattern) are quantised;
those that ``ignore`` fits are not. By the group's ``format``, or the config's, a linear layer (N, K) has

- pack-quantized: weight_packed (N, K bits / 32) int32, codes plus 2^(bits - 1), lowest bits first;
  weight_scale (N, groups), weight_zero_point packed along the outputs where asymmetric; weight_shape;
  weight_g_idx (K,) with the group of each input, where ``actorder`` is group;
- int-quantized, float-quantized, naive-quantized: weight int8 or e4m3; weight_scale (1,), (N, 1), (N, groups)
  or one a block;
- nvfp4-pack-quantized, mxfp4-pack-quantized: weight_packed (N, K / 2) uint8, weight_scale, and NVFP4's
  weight_global_scale, by which it is divided.

The value is ``scale (code - zero)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pelton.ir.activation_quant import ActivationQuant
from pelton.models.checkpoint.quantized.fp4 import fp4_weight
from pelton.models.checkpoint.quantized.fp8 import fp8_weight
from pelton.models.checkpoint.quantized.settings import Settings
from pelton.models.checkpoint.quantized.stored import FLOATS, Array, StoredTensors
from pelton.models.checkpoint.quantized.weight import (
    Integers,
    IntegerWeight,
    QuantizedWeight,
    act_order,
    unpack,
)

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
    "dense",
)
STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")
#: Values of ``actorder`` by which the columns of a group are not neighbours.
ORDERED = ("group", "dynamic", True)
_CODES = (".weight_packed", ".weight")


def compressed_weights(settings: Settings, stored: StoredTensors) -> Iterator[QuantizedWeight]:
    """Every quantised weight. Raises ``CheckpointError``."""
    settings.choice("format", known=FORMATS, default="dense")
    if settings.table("sparsity_config").get("format", "dense") != "dense":
        raise settings.wrong("sparsity_config", settings.table("sparsity_config").get("format"), "supported")
    if settings.get("transform_config"):
        raise settings.wrong("transform_config", "with rotations of activations", "supported")
    groups = [_Group(settings, name, group) for name, group in settings.table("config_groups").items()]
    ignored = settings.names("ignore")
    for name in stored:
        module = next((name.removesuffix(end) for end in _CODES if name.endswith(end)), None)
        if module is None or f"{module}.weight_scale" not in stored or _fits(settings, module, ignored):
            continue
        scheme = _scheme(settings, groups, module)
        if scheme is not None and stored.entry(name).type not in FLOATS:
            yield _weight(module, name, scheme, stored)


class _Group:
    """One entry of config_groups."""

    def __init__(self, settings: Settings, name: str, values: Any) -> None:
        where = f"{settings.where}, {name}"
        if not isinstance(values, dict):
            raise settings.wrong(name, values, "an object")
        own = Settings(where, values)
        self.targets = own.names("targets")
        self.weights = Settings(where + ", weights", own.table("weights"))
        inputs = own.table("input_activations")
        self.activation = activation_quant(Settings(where + ", input_activations", inputs))
        #: The scale of inputs was measured on calibration text.
        self.static = not inputs.get("dynamic", False)


def _fits(settings: Settings, module: str, patterns: tuple[str, ...]) -> bool:
    return any(
        settings.pattern("ignore", p[3:]).match(module) is not None if p.startswith("re:") else p == module
        for p in patterns
    )


def _scheme(settings: Settings, groups: list[_Group], module: str) -> _Group | None:
    """The group of a linear layer: by its name, else a pattern, else its class."""
    for wanted in ("name", "pattern", "class"):
        for group in groups:
            for target in group.targets:
                if wanted == "pattern" and target.startswith("re:"):
                    if settings.pattern("targets", target[3:]).match(module):
                        return group
                elif target == (module if wanted == "name" else "Linear" if wanted == "class" else ""):
                    return group
    return None


def activation_quant(settings: Settings) -> ActivationQuant | None:
    """How a group quantises inputs; None where it does not, or not to 8 bits."""
    if not settings.values or settings.integer("num_bits", default=8) != 8:
        return None
    kind = settings.choice("type", known=("int", "float"), default="int")
    if not settings.flag("symmetric", True):
        return None
    known = ("token", "tensor", "group", "tensor_group")
    strategy = settings.choice("strategy", known=known, default="tensor")
    group = settings.integer("group_size") if strategy == "group" else 0
    return ActivationQuant(
        "int8" if kind == "int" else "fp8", per="tensor" if strategy == "tensor" else "token", group=group
    )


def _weight(module: str, name: str, group: _Group, stored: StoredTensors) -> QuantizedWeight:
    weights = group.weights
    bits = weights.integer("num_bits", default=8)
    kind = weights.choice("type", known=("int", "float"), default="int")
    activation = group.activation
    extra = [f"{module}.{part}" for part in ("input_scale", "input_global_scale", "input_zero_point")]
    parts = [name, f"{module}.weight_scale", *(part for part in extra if part in stored)]
    if group.static and activation is not None and activation.per == "tensor":
        scale = stored.need_scalar(f"{module}.input_scale")
        activation = ActivationQuant(activation.dtype, per="tensor", scale=scale)
    if kind == "int":
        return _integers(module, name, bits, parts, weights, activation, stored)
    scale_name = f"{module}.weight_scale"
    if bits == 8:
        block = _block(weights, stored.need(name, ("float8_e4m3",)).shape[1])
        return fp8_weight(module, tuple(parts), name, scale_name, block, activation, stored)
    weights.integer("num_bits", among=(4, 8))
    tensor_scale = f"{module}.weight_global_scale"
    if weights.integer("group_size", among=(16, 32)) == 32:
        return fp4_weight(module, tuple(parts), name, scale_name, None, stored)
    parts.append(tensor_scale)
    return fp4_weight(module, tuple(parts), name, scale_name, tensor_scale, stored, divides=True)


def _block(weights: Settings, cols: int) -> tuple[int, int] | None:
    """Rows and columns that share an fp8 scale; None: see the scale's shape."""
    strategy = weights.choice("strategy", known=STRATEGIES, default="tensor")
    if strategy == "group":
        return 1, weights.integer("group_size")
    if strategy != "block":
        return None
    value = weights.get("block_structure")
    if isinstance(value, str):
        value = [int(v) if v.isdigit() else 0 for v in value.split("x")]
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(v, int) and v > 0 for v in value):
        raise weights.wrong("block_structure", value, "two sizes, of rows and columns")
    return value[0], value[1]


def _integers(
    module: str,
    name: str,
    bits: int,
    parts: list[str],
    weights: Settings,
    activation: ActivationQuant | None,
    stored: StoredTensors,
) -> QuantizedWeight:
    weights.integer("num_bits", default=8, among=(2, 3, 4, 8))
    packed = name.endswith("_packed")
    rows, cols = _shape(module, name, bits, parts, stored)
    strategy = weights.choice("strategy", known=STRATEGIES, default="tensor")
    group = weights.integer("group_size") if strategy == "group" else cols
    if group < 1 or cols % group:
        raise weights.wrong("group_size", group, f"a divisor of the {cols} columns of {module}")
    symmetric = weights.flag("symmetric", True)
    groups, scale, zero = cols // group, f"{module}.weight_scale", f"{module}.weight_zero_point"
    one = strategy == "tensor"
    if one:
        stored.need_scalar(scale)
    elif strategy == "channel" and scale in stored and stored.entry(scale).shape == (rows,):
        stored.need(scale, FLOATS, (rows,))
    else:
        stored.need(scale, FLOATS, (rows, groups))
    packed_zero = packed and not one
    if not symmetric:
        if packed_zero:
            stored.need(zero, ("int32",), (-(-rows * bits // 32), groups))
        else:
            stored.need(zero, ("int8",), stored.entry(scale).shape)
    if zero in stored:
        parts.append(zero)
    index, whole = _index(module, parts, cols, group, weights.get("actorder") in ORDERED, stored)
    middle = np.uint8(1 << (bits - 1))

    def start() -> Callable[[slice], Integers]:
        codes = stored.array(name)
        d = np.broadcast_to(stored.floats(scale).reshape(-1, groups), (rows, groups))
        z: Array | None = None
        if not symmetric:
            found = stored.array(zero)
            if packed_zero:
                z = unpack(found.T, bits)[:, :rows].T
            else:
                z = np.broadcast_to((found.view(np.uint8) + middle).reshape(-1, groups), (rows, groups))

        def read_rows(part: slice) -> Integers:
            if packed:
                q = unpack(codes[part], bits)[:, :cols]
            else:
                q = codes[part].view(np.uint8) + middle
            return Integers(q, d[part], None if z is None else z[part])

        return read_rows

    signed = symmetric and strategy != "group"
    weight = IntegerWeight(
        shape=(rows, cols), bits=bits, group=group, start=start, signed=signed, index=index, whole=whole
    )
    return QuantizedWeight(
        name=f"{module}.weight",
        parts=tuple(parts),
        shape=(rows, cols),
        quant=weight.quant,
        read=weight.read,
        order=weight.order,
        activation=activation,
    )


def _shape(module: str, name: str, bits: int, parts: list[str], stored: StoredTensors) -> tuple[int, int]:
    """Logical shape; the packed one does not tell how many codes its last words hold."""
    if not name.endswith("_packed"):
        if bits != 8:
            raise stored.wrong(f"has {name} unpacked, and its config says {bits} bits")
        rows, cols = stored.need(name, ("int8",)).shape
        return rows, cols
    found = stored.need(name, ("int32",)).shape
    shape = f"{module}.weight_shape"
    stored.need(shape, ("int64", "int32"), (2,))
    parts.append(shape)
    rows, cols = (int(size) for size in stored.array(shape))
    if rows < 1 or found != (rows, -(-cols * bits // 32)):
        raise stored.wrong(
            f"has {name} of {found[0]} x {found[1]} words, which do not hold the {rows} x {cols} codes of "
            f"{bits} bits that {shape} says"
        )
    return rows, cols


def _index(
    module: str, parts: list[str], cols: int, group: int, ordered: bool, stored: StoredTensors
) -> tuple[Callable[[], Array] | None, bool]:
    """``act_order`` of a weight whose ``actorder`` is group."""
    name = f"{module}.weight_g_idx"
    if name not in stored:
        if ordered and cols > group:
            raise stored.wrong(f"has no tensor {name}, which actorder needs")
        return None, True
    parts.append(name)
    stored.need(name, ("int32", "int64"), (cols,))
    index = stored.array(name)
    if (index == -1).all():  # as they are before calibration: no order
        return None, True
    return act_order(index, group, name, stored)
