"""What to quantise a model to, and how: ``QuantConfig``, held to what the algorithms can do."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable
from typing import Literal

import msgspec

from pelton.dtypes import (
    BLOCK_TYPES,
    GGUF_BLOCK_TYPES,
    GROUP_BLOCK_TYPES,
    GROUP_SIZES,
    NATIVE_BLOCK_TYPES,
)
from pelton.errors import ConfigError
from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.block_encoder import ENCODED
from pelton.ir.group_blocks import bits_of
from pelton.quant.config_types import check_types

#: Of calibration text: beyond it is a slip, which should not end as a lack of memory.
MOST_SEQUENCES = 100_000
#: Says that a module keeps its values.
NONE = "none"

Rounding = Literal["nearest", "gptq"]
Scaling = Literal["none", "awq", "smoothquant"]

ROUNDINGS: tuple[Rounding, ...] = ("nearest", "gptq")
SCALINGS: tuple[Scaling, ...] = ("none", "awq", "smoothquant")


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The text that statistics of activations come from."""

    text: str | None = None
    """A UTF-8 file; None: the first half of the documentation topics of Python's library."""
    sequences: int = 32
    length: int = 512
    """Tokens of a sequence (at most the model's own limit)."""
    seed: int = 0
    """Of the places where sequences begin."""


class QuantConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the linear layers of a model's decoder layers are quantised.

    First ``scaling`` moves factors between a layer's input channels and what makes its input, so that the
    network's function stays and its weights round better; then ``rounding`` chooses the codes. Patterns are
    shell patterns of module names as Hugging Face has them (``model.layers.3.mlp.down_proj``).
    """

    name: str = ""
    """Of the recipe that it was made from."""
    weights: str = "int4_g128"
    """Block type of the weights (``dtypes.BLOCK_TYPES``): number of bits and values that share a scale."""
    rounding: Rounding = "nearest"
    """``nearest``, or ``gptq`` (Frantar et al. 2022)."""
    scaling: Scaling = "none"
    """``none``, ``awq`` (Lin et al. 2023) or ``smoothquant`` (Xiao et al. 2022)."""
    symmetric: bool = True
    """Groups of integers have their zero in the middle of the codes; the other types always have."""
    per_tensor: bool = False
    """Row types: one scale for the whole tensor."""
    clip: bool = False
    """Nearest rounding of integer groups: shrink each group's range where that lowers the output's error
    (AWQ's search)."""
    progressive: bool = False
    """4-bit groups within 8-bit rows: group scales are whole multiples of a row's scale (QServe)."""
    double_quantization: bool = False
    """NF4: scales are 8-bit floats of groups of 256 scales (QLoRA); the engine keeps them as float32."""
    modules: tuple[str, ...] = ("*",)
    """Which linear layers of the decoder layers."""
    ignore: tuple[str, ...] = ()
    """Which of them to leave as they are."""
    overrides: dict[str, str] = {}
    """Pattern -> block type, or none: the first that fits goes before ``weights``. The head and the
    embeddings are quantised (to nearest) only where one of these names them: ``lm_head``."""
    activations: ActivationQuant | None = None
    """How the inputs of quantised layers are quantised; with a ``scale`` of -1 it is measured on the text."""
    kv: Literal["int8", "fp8"] | None = None
    """Type of KV caches: ``build --quant`` takes it unless ``kv_dtype`` says otherwise; checkpoints that are
    written say so, with a scale for each layer's keys and values. None: the build's choice."""
    alpha: float | None = None
    """How much of the difficulty moves from activations to weights, 0 to 1; None: searched for each input."""
    act_order: bool = True
    """GPTQ: columns in the order of their activations' size; groups stay contiguous (static groups)."""
    damping: float = 0.01
    """GPTQ: share of the Hessian's mean diagonal that is added to it."""
    calibration: Calibration = Calibration()

    @property
    def calibrated(self) -> bool:
        """Whether activations must be seen."""
        static = self.activations is not None and self.activations.scale < 0
        return self.rounding != "nearest" or self.scaling != "none" or self.clip or static

    @property
    def algorithm(self) -> str:
        """In the field's words: rtn, gptq, awq, smoothquant, awq+gptq, smoothquant+gptq."""
        parts = [self.scaling] * (self.scaling != "none") + [self.rounding] * (self.rounding != "nearest")
        return "+".join(parts) or "rtn"

    def type_of(self, module: str, *, outside: bool = False) -> str:
        """Block type for a module, ``none``: leave it. ``outside`` the decoder layers (the head, embeddings)
        only overrides count."""
        for pattern, quant in self.overrides.items():
            if fnmatch.fnmatchcase(module, pattern):
                return quant
        if outside or _matches(module, self.ignore) or not _matches(module, self.modules):
            return NONE
        return self.weights

    def check_inputs(self, module: str, weights: str) -> None:
        """Raise ``ConfigError`` where ``module``'s inputs cannot be quantised as ``activations`` says, since
        its weights are of type ``weights`` (an override of a layer's)."""
        a, where = self.activations, f" ({module})" if module else ""
        if a is None:
            return
        allowed = activation_types(weights)
        if a.dtype not in allowed:
            raise ConfigError(
                f"{a.dtype} activations do not go with {weights} weights{where} (for {weights}: "
                f"{', '.join(allowed) or 'none'})"
            )
        if a.outliers and weights != "int8_row":
            raise ConfigError(
                f"outliers are for dynamic int8 activations of int8_row weights (LLM.int8), not for {weights}"
                f"{where}"
            )

    def check(self) -> None:
        """Raise ``ConfigError`` for what no algorithm here does, with what they do."""
        check_types(self)
        for quant in (self.weights, *self.overrides.values()):
            if quant == NONE and quant != self.weights:
                continue
            if quant not in WEIGHT_TYPES:
                raise ConfigError(
                    f"weights cannot be quantised to {quant!r} (known: {', '.join(WEIGHT_TYPES)})"
                )
            for allowed, field in ((roundings(quant), self.rounding), (scalings(quant), self.scaling)):
                if field not in allowed:
                    raise ConfigError(
                        f"{field} does not make {quant} weights (for {quant}: {', '.join(allowed)}; "
                        f"{field} makes: {', '.join(_types_with(field))})"
                    )
        self._check_weights()
        self._check_activations()
        self._check_numbers()
        unused = idle(self)
        for name in ("alpha", "act_order", "damping"):
            if name in unused and getattr(self, name) != _DEFAULTS[name]:
                raise ConfigError(f"{name} is for {unused[name]}, not for {describe(self)}; leave it out")

    def _check_weights(self) -> None:
        plain = self.rounding == "nearest"
        integers = ", ".join(filter(is_integer_group, WEIGHT_TYPES))
        w8a8 = self.activations is not None and self.activations.dtype == "int8"
        for field, fits, what in (
            ("per_tensor", self.weights.endswith("_row"), "int8_row and fp8_row weights"),
            (
                "clip",
                plain and is_integer_group(self.weights),
                f"integer groups rounded to nearest ({integers})",
            ),
            (
                "double_quantization",
                plain and self.weights == "nf4_g64",
                "nf4_g64 weights rounded to nearest",
            ),
            (
                "progressive",
                plain and w8a8 and self.weights.startswith("int4_g"),
                "int4 groups rounded to nearest with int8 activations (W4A8)",
            ),
        ):
            if getattr(self, field) and not fits:
                raise ConfigError(f"{field} is for {what}, not for {describe(self)}")

    def _check_activations(self) -> None:
        a = self.activations
        if a is None:
            if self.scaling == "smoothquant":
                raise ConfigError("smoothquant is for quantised activations; set activations, or use awq")
            return
        self.check_inputs("", self.weights)
        if a.scale and a.per != "tensor":
            raise ConfigError("a static activation scale is one for the tensor: set per to tensor")
        if not (math.isfinite(a.scale) and 0 <= a.outliers < math.inf and a.group >= 0):
            raise ConfigError(
                "activations have a finite scale, finite outliers and a group of at least 0, not "
                f"{a.scale}, {a.outliers}, {a.group}"
            )
        if a.group and a.per != "token":
            raise ConfigError("a group of columns is of a token's activations: set per to token")
        if a.outliers and (a.dtype != "int8" or a.scale):
            raise ConfigError("outliers are for dynamic int8 activations of int8_row weights (LLM.int8)")

    def _check_numbers(self) -> None:
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha must be between 0 and 1, not {self.alpha}")
        if not 0 < self.damping < 1:
            raise ConfigError(f"damping must be between 0 and 1, not {self.damping}")
        c = self.calibration
        if c.seed < 0:
            raise ConfigError(f"the calibration's seed must not be negative, and is {c.seed}")
        if c.sequences < 1 or c.length < 2:
            raise ConfigError(
                f"calibration needs a sequence of at least 2 tokens, not {c.sequences} of {c.length}"
            )
        if c.sequences > MOST_SEQUENCES:
            raise ConfigError(f"{c.sequences} sequences of calibration are beyond {MOST_SEQUENCES}; use less")


_DEFAULTS = dict(zip(QuantConfig.__struct_fields__, QuantConfig.__struct_defaults__, strict=True))


def idle(config: QuantConfig) -> dict[str, str]:
    """Fields that change nothing of what ``config`` does -> what they are for."""
    types = (config.weights, *config.overrides.values())
    found = {
        "alpha": ("awq and smoothquant scaling", config.scaling != "none"),
        "act_order": ("gptq", config.rounding == "gptq"),
        "damping": ("gptq", config.rounding == "gptq"),
        "symmetric": (
            "groups of integers, the only types with zero points",
            any(map(is_integer_group, types)),
        ),
        "calibration": ("recipes that see text", config.calibrated),
    }
    return {field: use for field, (use, used) in found.items() if not used}


#: What weights may become: GGUF's that CPUs have kernels for by plain rounding, others by everything below.
WEIGHT_TYPES = (*GROUP_BLOCK_TYPES, *(quant for quant in ENCODED if quant in NATIVE_BLOCK_TYPES))

#: GGUF types of 256 values -> types of 32 for other widths, as llama.cpp chooses.
_WITHOUT_SUPER_BLOCKS = {"q4_k": "q5_0", "q6_k": "q8_0"}


def is_integer_group(quant: str) -> bool:
    """Whether it has scales and zero points of groups."""
    return quant.startswith("int") and "_g" in quant


def roundings(quant: str) -> tuple[Rounding, ...]:
    """What chooses codes of a type."""
    return ("nearest",) if quant in GGUF_BLOCK_TYPES else ROUNDINGS


def scalings(quant: str) -> tuple[Scaling, ...]:
    """What may rescale channels before: all of a type; smoothquant where activations may be quantised."""
    return SCALINGS if activation_types(quant) else ("none", "awq")


def activation_types(quant: str) -> tuple[str, ...]:
    """Activations that go with weights: integers with either, fp8 with fp8."""
    if quant.startswith("fp8"):
        return ("fp8",)
    return ("int8", "fp8") if quant.startswith(("int4", "int8")) else ()


def smaller_group(quant: str, columns: int) -> str:
    """``quant``, or the same with the largest group that divides ``columns``; ``none`` where none does."""
    if columns % BLOCK_TYPES[quant].block_size == 0:
        return quant
    if quant.startswith("fp8"):
        return "fp8_row"
    if quant in _WITHOUT_SUPER_BLOCKS and columns % 32 == 0:
        return _WITHOUT_SUPER_BLOCKS[quant]
    if is_integer_group(quant):
        kind, size = quant.split("_g")
        for group in sorted(GROUP_SIZES, reverse=True):
            if group < int(size) and columns % group == 0:
                return f"{kind}_g{group}"
    return NONE


def describe(config: QuantConfig) -> str:
    """In a few words: ``awq int4_g128 asymmetric, clipped, activations int8 per token``."""
    parts = [f"{config.algorithm} {config.weights}"]
    if is_integer_group(config.weights):
        parts[0] += " symmetric" if config.symmetric else " asymmetric"
    parts += ["one scale a tensor"] * config.per_tensor + ["clipped"] * config.clip
    parts += ["progressive"] * config.progressive + ["double quantisation"] * config.double_quantization
    if a := config.activations:
        scale = "static" if a.scale else "dynamic"
        outliers = f", outliers beyond {a.outliers:g} exact" if a.outliers else ""
        per = f"{a.group} columns of a {a.per}" if a.group else a.per
        parts.append(f"{a.dtype} activations, {scale} per {per}{outliers}")
    parts += [f"{config.kv} KV caches"] * (config.kv is not None)
    return ", ".join(parts)


def weight_bits(quant: str) -> float:
    """Bits of a value, its share of the scales included, of long rows."""
    block = BLOCK_TYPES[quant]
    return 8 * block.block_bytes / block.block_size


def code_bits(quant: str) -> int:
    """Bits of a code alone."""
    return bits_of(quant) if quant in GROUP_BLOCK_TYPES else int(quant[1])


def _types_with(what: str) -> list[str]:
    return [q for q in WEIGHT_TYPES if what in (*roundings(q), *scalings(q))]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
