"""What a quantisation did to each layer."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from pelton.builder.quantized_view import Target
from pelton.dtypes import BLOCK_TYPES
from pelton.engine.resources import human_bytes
from pelton.quant.config import QuantConfig, describe


class LinearReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One weight."""

    tensor: str
    """Its Hugging Face name."""
    quant: str
    weight_error: float
    """Relative error of its values, root of summed squares."""
    output_error: float | None = None
    """The same of its outputs on the calibration text; None: it saw none."""
    alpha: float | None = None
    """Exponent of the factors that its input's channels were scaled with; None: they were not."""


class LayerReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One decoder layer."""

    name: str
    linears: tuple[LinearReport, ...]
    output_error: float | None = None
    """Relative error of the layer's contribution to the hidden states, on some of the calibration text."""


class QuantizeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole model."""

    recipe: str
    """In words."""
    layers: tuple[LayerReport, ...]
    weights: int
    """Bytes of the quantised weights."""
    bits: float
    """Bits of a quantised value, scales included."""
    calibration_tokens: int
    notes: tuple[str, ...]

    def text(self) -> str:
        """For people: a line for each layer."""
        lines = []
        for layer in self.layers:
            worst = max(layer.linears, key=lambda row: row.output_error or row.weight_error)
            parts = [f"weights {_rms([row.weight_error for row in layer.linears]):.2%}"]
            if layer.output_error is not None:
                parts.append(f"output {layer.output_error:.2%}")
            size = worst.output_error or worst.weight_error
            parts.append(f"worst {worst.tensor.removeprefix(layer.name + '.')} {size:.2%}")
            lines.append(f"  {layer.name:<24} relative error: {', '.join(parts)}")
        lines += [f"  note        {note}" for note in self.notes]
        return "\n".join(lines)

    def summary(self) -> str:
        """In a line."""
        what = f"{self.recipe}, {self.bits:.2f} bits a weight, {human_bytes(self.weights)} of weights"
        return what + (f", calibrated on {self.calibration_tokens} tokens" if self.calibration_tokens else "")


def _rms(values: list[float]) -> float:
    return float((sum(value * value for value in values) / len(values)) ** 0.5)


def report_of(
    config: QuantConfig,
    layers: tuple[LayerReport, ...],
    found: Collection[Target],
    tokens: int,
    notes: tuple[str, ...],
) -> QuantizeReport:
    """Of all layers: ``layers`` has those of which nothing was quantised too; ``found`` is what was."""
    nbytes = sum(t.shape[0] * BLOCK_TYPES[t.quant].row_bytes(t.shape[1]) for t in found)
    values = sum(t.shape[0] * t.shape[1] for t in found)
    return QuantizeReport(
        recipe=describe(config),
        layers=tuple(layer for layer in layers if layer.linears),
        weights=nbytes,
        bits=8 * nbytes / values,
        calibration_tokens=tokens,
        notes=notes,
    )
