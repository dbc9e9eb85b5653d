"""Quantises a checkpoint layer by layer: the stages of one layer, and going on where a killed run stopped.

For each decoder layer: load its weights in float32; run the calibration text through it and gather statistics
of each linear layer's input; move factors between channels (``scaling``); choose codes (``rounding``); keep
the result; run the quantised layer, so that the next one sees what it will get. One layer, its statistics
and the hidden states of the calibration text are in memory, never the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from pelton import nn
from pelton.builder.calibration import CalibrationRun, decoder_layers
from pelton.builder.clock import Progress
from pelton.builder.eager import round_input
from pelton.builder.facts import model_recipes
from pelton.builder.layer_structure import SharedInput, clippable, fold, shared_inputs
from pelton.builder.quantize_prepare import Prepared, digest, prepare
from pelton.builder.quantize_report import LayerReport, LinearReport, QuantizeReport, report_of
from pelton.builder.quantize_state import Layer, QuantizeState
from pelton.builder.quantized_view import (
    QuantizedCheckpoint,
    Target,
    float_weight,
    naming,
    places,
    plain_values,
    plain_weight,
    row_parts,
    tensor_info,
)
from pelton.errors import BuildError
from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.blocks import dequantize
from pelton.ir.evaluate import evaluate
from pelton.ir.tensors import HostTensor
from pelton.models.checkpoint import Checkpoint, assert_finite
from pelton.quant import awq, smoothquant
from pelton.quant.config import QuantConfig, describe, is_integer_group
from pelton.quant.gptq import gptq
from pelton.quant.nvfp4 import headers
from pelton.quant.statistics import Float32, InputStatistics, relative_errors

#: Largest relative change of a layer's outputs by folding factors, which changes no function.
_FOLDED = 1e-3


def quantize(
    checkpoint: Checkpoint, config: QuantConfig, folder: Path, *, progress: Progress | None = None
) -> tuple[QuantizedCheckpoint, QuantizeReport]:
    """``checkpoint`` quantised as ``config`` says; finished layers are kept in ``folder``, and read there.

    Raises ``ConfigError`` for a recipe that cannot be followed, ``CheckpointError`` for a model or values
    that cannot be quantised, ``BuildError`` naming the layer whose activations are not finite.
    """
    ready = prepare(checkpoint, config)
    found, notes = ready.targets, ready.notes
    state = QuantizeState(folder, digest(checkpoint, config), f"{checkpoint.name}, {describe(config)}")
    work = _Quantizer(checkpoint, config, ready, state)
    work.run(progress or (lambda stage, done, total: None))
    count = len(work.layers) + 1
    where = state.describe(range(count))
    blocks = {name for name, (_, quant, _) in where.items() if quant != "float32"}
    view = QuantizedCheckpoint(
        checkpoint,
        config,
        {n: tensor_info(n, q, s) for n, (_, q, s) in where.items()},
        lambda name: state.read(where[name][0], name),
        transposed=[p.tensor for p in work.places.values() if p.transposed and p.tensor in blocks],
        activations=state.activations(range(count)),
        notes=notes,
    )
    reports = tuple(state.report(i) for i in range(count))
    return view, report_of(config, reports, found.values(), work.tokens, notes)


class _Quantizer:
    def __init__(
        self,
        checkpoint: Checkpoint,
        config: QuantConfig,
        ready: Prepared,
        state: QuantizeState,
    ) -> None:
        model, sequences = ready.model, ready.sequences
        self._checkpoint, self._config, self._state = checkpoint, config, state
        self._recipes = model_recipes(model, checkpoint.source)
        self.places = places(model)
        self._prefix, self.layers = decoder_layers(model)
        self._targets = ready.targets
        self._run: CalibrationRun | None = None
        self.tokens = 0
        if sequences is not None:
            self.tokens = sequences.size
            if not all(map(state.has, range(len(self.layers)))):
                self._run = CalibrationRun(model, self._recipes, checkpoint, sequences)

    def run(self, progress: Progress) -> None:
        """Every layer, and last what is outside of them, under the index after the last layer's."""
        total = len(self.layers)
        if not self._state.has(total):
            self._check_outside()
        for index in range(total):
            progress("quantise", index, total)
            finished = self._state.has(index)
            if finished and self._run is None:
                continue
            with self._loaded(index) as layer:
                if not finished:
                    self._state.save(index, self._quantize(index, layer))
                if self._run is not None:
                    self._advance(index, layer)
        if not self._state.has(total):
            self._state.save(total, self._outside())
        progress("quantise", total, total)

    # ---- One layer ----

    @contextmanager
    def _loaded(self, index: int) -> Any:
        """The layer with its weights in float32; on the meta device again afterwards."""
        layer = self.layers[index]
        meta = dict(layer.named_parameters())
        try:
            for name in meta:
                full = self._full(index, name)
                tensor = evaluate(self._recipes[full], self._checkpoint.read)
                assert_finite(tensor, self.places[full].tensor)
                # dequantize makes a copy: scaling writes into it.
                self._put(layer, name, dequantize(tensor))
            yield layer
        finally:
            for name, parameter in meta.items():
                owner, _, own = name.rpartition(".")
                layer.get_submodule(owner)._parameters[own] = parameter

    def _full(self, index: int, name: str) -> str:
        return f"{self._prefix}.{index}.{name}"

    def _put(self, layer: Any, name: str, values: Float32) -> None:
        owner, _, own = name.rpartition(".")
        parameter = torch.nn.Parameter(torch.from_numpy(values), requires_grad=False)
        layer.get_submodule(owner)._parameters[own] = parameter

    def _target(self, index: int, linear: str) -> Target | None:
        return self._targets.get(self._full(index, f"{linear}.weight"))

    def _quantize(self, index: int, layer: Any) -> Layer:
        config = self._config
        linears = [name for name, m in layer.named_modules() if isinstance(m, nn.Linear)]
        statistics: dict[str, InputStatistics] = {}
        alphas: dict[str, float] = {}
        changed: set[str] = set()
        before = None
        if self._run is not None:
            shared = shared_inputs(layer, lambda: self._forward_first(index))
            statistics = self._gather(index, layer, shared)
            before = self._forward_first(index)
            if config.scaling != "none":
                changed = self._scale(index, layer, shared, statistics, alphas)
                self._check_folded(index, before)
        tensors: dict[str, HostTensor] = {}
        activations: dict[str, ActivationQuant] = {}
        rows = []
        kept = {n: t for n in linears if (t := self._target(index, n)) is not None and t.quant == "nvfp4"}
        rows_of = headers({t.place.module: layer.get_submodule(n).weight.numpy() for n, t in kept.items()})
        clips = clippable(layer) if config.clip else frozenset()
        for linear in linears:
            target = self._target(index, linear)
            # Gram matrices, and weights that have codes, are let go at once: they are what is large.
            seen = statistics.pop(linear, None)
            if target is not None:
                module, clip = layer.get_submodule(linear), linear in clips
                header = rows_of.get(target.place.module)
                row = self._linear(module, target, seen, tensors, activations, clip=clip, header=header)
                rows.append(msgspec.structs.replace(row, alpha=alphas.get(linear)))
                changed.discard(f"{linear}.weight")
                if before is not None:
                    module.weight = torch.nn.Parameter(module.weight.to("meta"), requires_grad=False)
            del seen
        for name in sorted(changed):
            place = self.places[self._full(index, name)]
            tensors[place.tensor] = place.dense(layer.get_parameter(name).numpy())
        error = None
        if before is not None:
            self._use(index, layer, tensors)
            with self._rounding_inputs(index, layer, activations):
                error = self._contribution_error(index, before)
        report = LayerReport(name=f"{self._prefix}.{index}", linears=tuple(rows), output_error=error)
        return Layer(tensors=tensors, activations=activations, report=report)

    def _linear(
        self,
        module: Any,
        target: Target,
        seen: InputStatistics | None,
        tensors: dict[str, HostTensor],
        activations: dict[str, ActivationQuant],
        *,
        clip: bool,
        header: Float32 | None,
    ) -> LinearReport:
        """Choose the codes of a linear layer's weight: what is kept of it, and its report."""
        weight, name = module.weight.numpy(), target.place.tensor
        with naming(name):
            tensors[name] = tensor = self._round(weight, target.quant, seen, header, clip=clip)
        if self._config.activations is not None:
            tops = np.zeros(1, np.float32) if seen is None else seen.abs_max
            of_input = self._config.activations.of_columns(weight.shape[1])
            activations[name] = smoothquant.settled(of_input, tops)
        of_weight, of_output = relative_errors(weight, tensor, seen.gram if seen else None)
        return LinearReport(
            tensor=name,
            quant=target.quant,
            weight_error=of_weight,
            output_error=None if np.isnan(of_output) else of_output,
        )

    def _gather(self, index: int, layer: Any, shared: list[SharedInput]) -> dict[str, InputStatistics]:
        """Statistics of each linear layer's input; those that share it share them."""
        assert self._run is not None
        found: dict[str, InputStatistics] = {}
        hooks = []
        for group in shared:
            first = layer.get_submodule(group.linears[0])
            statistics = InputStatistics.empty(first.in_features)
            found.update(dict.fromkeys(group.linears, statistics))

            def see(_: Any, arguments: tuple[Any, ...], statistics: InputStatistics = statistics) -> None:
                statistics.add(arguments[0].numpy())

            hooks.append(first.register_forward_pre_hook(see))
        for _ in self._run.forward(index, keep=False):
            pass
        for hook in hooks:
            hook.remove()
        for linear, statistics in found.items():
            if not np.isfinite(statistics.gram).all():
                raise BuildError(
                    f"the inputs of {self._full(index, linear)} are not finite on the calibration text, so "
                    "it cannot be quantised; use a recipe without calibration, or another text"
                )
        return found

    def _scale(
        self,
        index: int,
        layer: Any,
        shared: list[SharedInput],
        statistics: dict[str, InputStatistics],
        alphas: dict[str, float],
    ) -> set[str]:
        """Choose and fold the factors of each input; returns the parameters that changed."""
        changed: set[str] = set()
        for group in shared:
            kept = [(name, t) for name in group.linears if (t := self._target(index, name)) is not None]
            if not kept or not group.foldable:
                continue
            weights, rounders = [], []
            for name, target in kept:
                parts = row_parts(layer.get_submodule(name).weight.numpy(), target.quant, self._config)
                weights += parts
                rounders += [partial(plain_values, quant=target.quant, config=self._config)] * len(parts)
            seen = statistics[group.linears[0]]
            with naming(" or ".join(t.place.tensor for _, t in kept)):
                s, alpha = self._factors(weights, seen, rounders, group)
            if alpha is None or (s == 1).all():
                continue
            fold(layer, group, s)
            alphas.update(dict.fromkeys(group.linears, alpha))
            seen.divide(s)
            makers = [m for m in (group.norm, group.rows and group.rows.linear) if m]
            changed |= {f"{name}.weight" for name in (*group.linears, *makers)}
            changed |= {
                f"{m}.bias" for m in makers if getattr(layer.get_submodule(m), "bias", None) is not None
            }
        return changed

    def _factors(
        self,
        weights: Sequence[Float32],
        seen: InputStatistics,
        rounders: Sequence[awq.Rounder],
        group: SharedInput,
    ) -> tuple[Float32, float | None]:
        config = self._config
        if config.scaling == "awq":
            return awq.search_scales(weights, seen, rounders, config.alpha, group.agreeing)
        assert config.activations is not None
        of_input = config.activations.of_columns(weights[0].shape[1])
        return smoothquant.search_scales(weights, seen, rounders, of_input, config.alpha, group.agreeing)

    def _round(
        self, weight: Float32, quant: str, seen: InputStatistics | None, header: Float32 | None, *, clip: bool
    ) -> HostTensor:
        config = self._config
        if seen is not None and config.rounding == "gptq":
            return gptq(
                weight,
                seen.gram,
                quant,
                symmetric=config.symmetric,
                per_tensor=config.per_tensor and quant.endswith("_row"),
                act_order=config.act_order,
                damping=config.damping,
                row=header,
            )
        if seen is not None and clip and is_integer_group(quant):
            return awq.clipped_nearest(weight, seen.gram, quant, symmetric=config.symmetric)
        return plain_weight(weight, quant, config, header)

    # ---- Running ----

    def _forward_first(self, index: int) -> Any:
        assert self._run is not None
        return self._run.forward_first(index)

    def _advance(self, index: int, layer: Any) -> None:
        """Run the finished layer on all calibration text."""
        assert self._run is not None
        kept = self._state.load(index)
        self._use(index, layer, kept.tensors)
        with self._rounding_inputs(index, layer, kept.activations):
            for out in self._run.forward(index, keep=True):
                if not torch.isfinite(out).all():
                    raise BuildError(
                        f"the outputs of {self._prefix}.{index} are not finite after quantisation; "
                        "leave it out (ignore), or give it more bits (overrides)"
                    )

    def _use(self, index: int, layer: Any, tensors: Mapping[str, HostTensor]) -> None:
        """Give the layer the values of ``tensors``, as the engine will have them."""
        for name, _ in list(layer.named_parameters()):
            place = self.places[self._full(index, name)]
            if place.tensor in tensors:
                self._put(layer, name, place.parameter(tensors[place.tensor]))

    @contextmanager
    def _rounding_inputs(self, index: int, layer: Any, activations: Mapping[str, ActivationQuant]) -> Any:
        """Quantises the inputs of linear layers while they run."""
        hooks = []
        for name, module in layer.named_modules():
            if not isinstance(module, nn.Linear):
                continue
            quant = activations.get(self.places[self._full(index, f"{name}.weight")].tensor)
            if quant is not None:
                hooks.append(module.register_forward_pre_hook(partial(round_input, quant)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _check_folded(self, index: int, before: Any) -> None:
        after = self._forward_first(index)
        change = float((after - before).norm() / before.norm())
        if not change < _FOLDED:
            raise BuildError(
                f"moving factors between the channels of {self._prefix}.{index} changed what it computes "
                f"(by {change:.1e}), so its structure is not understood; use a recipe without scaling"
            )

    def _contribution_error(self, index: int, before: Any) -> float:
        """Relative error of what the layer adds to the hidden states."""
        assert self._run is not None
        added = (before - self._run.first).norm()
        return float((self._forward_first(index) - before).norm() / added) if added > 0 else 0.0

    def _check_outside(self) -> None:
        """Embeddings, head and last norm are finite: layers are looked at when they are loaded."""
        for name, place in self.places.items():
            if not name.startswith(self._prefix + "."):
                recipe = self._checkpoint.source(place.tensor)
                assert_finite(evaluate(recipe, self._checkpoint.read), place.tensor)

    def _outside(self) -> Layer:
        """The head and embeddings, where an override names them: to nearest."""
        tensors, rows = {}, []
        for name, target in self._targets.items():
            if name.startswith(self._prefix + "."):
                continue
            weight = float_weight(self._checkpoint, target.place)
            with naming(target.place.tensor):
                tensor = plain_weight(weight, target.quant, self._config)
            tensors[target.place.tensor] = tensor
            of_weight, _ = relative_errors(weight, tensor, None)
            rows.append(LinearReport(tensor=target.place.tensor, quant=target.quant, weight_error=of_weight))
        report = LayerReport(name="outside the layers", linears=tuple(rows))
        return Layer(tensors=tensors, activations={}, report=report)
