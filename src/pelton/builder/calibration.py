"""Calibration text through a model, a layer at a time: what a layer gets, and running it.

Holds the hidden states of all calibration tokens between two layers and one layer's weights, never the model.
It works on any model whose decoder layers are one ``ModuleList`` and take the hidden states first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pelton import nn
from pelton.builder.eager import StreamedWeights
from pelton.builder.text import BUILT_IN, Ids, built_in, checkpoint_text, read_text
from pelton.errors import BuildError, CheckpointError, ConfigError
from pelton.ir.recipe import Recipe
from pelton.models.checkpoint import Checkpoint
from pelton.quant.config import Calibration

#: Tokens that run through a layer at a time.
_BATCH = 2048
_BLOCK = 16


def calibration_sequences(calibration: Calibration, checkpoint: Checkpoint, model: nn.CausalLM) -> Ids:
    """Token ids (sequences, length): pieces of the text from random places on, each begun as the tokenizer
    begins a text.

    Raises ``ConfigError`` for a text that cannot be read or is shorter than one sequence.
    """
    from pathlib import Path

    length = min(calibration.length, model.max_position_embeddings)
    if calibration.text is None:
        text, name = built_in(0), BUILT_IN
    else:
        path = Path(calibration.text)
        text, name = read_text(path, "calibration text"), path.name
    ids, first = checkpoint_text(checkpoint, text, model.vocab_size, name=name)
    if ids.size < length:
        raise ConfigError(
            f"the calibration text {name} has {ids.size} tokens of this model, and a sequence {length}; "
            "give a longer text or a smaller length"
        )
    rng = np.random.default_rng(calibration.seed)
    starts = rng.integers(0, ids.size - length + 1, calibration.sequences)
    return np.stack([np.concatenate([first, ids[start : start + length]])[:length] for start in starts])


def decoder_layers(model: nn.CausalLM) -> tuple[str, torch.nn.ModuleList]:
    """The decoder layers and their name in the model. Raises ``CheckpointError`` where there are none."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == model.num_layers:
            return name, module
    raise CheckpointError(
        f"{type(model).__name__} has no list of decoder layers, so it cannot be quantised; "
        "models with a file of their own in Pelton can"
    )


class _StopError(Exception):
    """Ends a forward pass after the last decoder layer."""


@dataclass
class _Batch:
    hidden: Any
    """What the next layer gets, (T, D)."""
    arguments: list[tuple[Any, ...]] = field(default_factory=list)
    """What each layer gets besides."""


class CalibrationRun:
    """Hidden states of calibration text on their way through the layers of ``model`` (on the meta device).

    ``recipes``: of the model's parameters over what ``checkpoint.read`` gives. The embedding runs at once;
    ``forward`` then runs a layer whose weights the caller has loaded.
    """

    def __init__(
        self, model: nn.CausalLM, recipes: Mapping[str, Recipe], checkpoint: Checkpoint, sequences: Ids
    ) -> None:
        self.name, self.layers = decoder_layers(model)
        inside = {module for layer in self.layers for module in layer.modules()}
        StreamedWeights(model, recipes, checkpoint.read, skip=inside)
        step = max(1, _BATCH // sequences.shape[1])
        parts = [sequences[i : i + step] for i in range(0, len(sequences), step)]
        # Nothing is read again after its layer has run, so layers of one shape share a cache.
        self._caches = _caches(model, step, sequences.shape[1])
        with torch.inference_mode():
            self._batches = [self._enter(model, part) for part in parts]

    @property
    def first(self) -> Any:
        """The hidden states (T, D) of the first batch, before the next layer."""
        return self._batches[0].hidden

    def forward(self, index: int, *, keep: bool) -> Iterator[Any]:
        """Run layer ``index`` on one batch after another, giving its outputs (T, D); with ``keep`` they
        become the hidden states."""
        for batch in self._batches:
            # Not around the yield: the mode would stay on in the caller.
            with torch.inference_mode():
                out = self.layers[index](batch.hidden, *batch.arguments[index])
            if keep:
                batch.hidden = out
            yield out

    def forward_first(self, index: int) -> Any:
        """The outputs of layer ``index`` for the first batch, which is kept as it is."""
        return next(iter(self.forward(index, keep=False)))

    def _enter(self, model: nn.CausalLM, sequences: Ids) -> _Batch:
        """Run what comes before the layers, and note what each of them is called with."""
        batch = _Batch(hidden=None)

        def note(hidden: Any, *arguments: Any, **named: Any) -> Any:
            if named:
                raise BuildError(
                    f"the decoder layers of {type(model).__name__} take named arguments "
                    f"({', '.join(named)}); its file must pass them in order for quantisation"
                )
            if not batch.arguments:
                batch.hidden = hidden
            batch.arguments.append(arguments)
            if len(batch.arguments) == len(self.layers):
                raise _StopError
            return hidden

        own = [layer.__dict__.pop("forward", None) for layer in self.layers]
        for layer in self.layers:
            layer.forward = note
        try:
            model(*_step(model, sequences, self._caches))
        except _StopError:
            pass
        finally:
            for layer, forward in zip(self.layers, own, strict=True):
                del layer.forward
                if forward is not None:
                    layer.forward = forward
        return batch


def _caches(model: nn.CausalLM, sequences: int, length: int) -> list[Any]:
    """A cache of each layer, one for all of a shape; it does for keys and, beside another, for values."""
    blocks = sequences * -(-length // _BLOCK)
    made: dict[tuple[int, int], Any] = {}
    for kv in model.layer_kv():
        shape = (kv.num_kv_heads, kv.head_dim)
        if shape not in made:
            made[shape] = [torch.zeros(blocks, shape[0], _BLOCK, shape[1]) for _ in range(2)]
    return [made[kv.num_kv_heads, kv.head_dim] for kv in model.layer_kv()]


def _step(model: nn.CausalLM, sequences: Ids, caches: list[Any]) -> tuple[Any, ...]:
    """The model's arguments: each row of ``sequences`` a sequence of its own, in one step."""
    count, length = sequences.shape
    per = -(-length // _BLOCK)
    positions = torch.arange(length, dtype=torch.int32).repeat(count)
    first = torch.arange(count, dtype=torch.int32) * per * _BLOCK
    slots = positions + first.repeat_interleave(length)
    table = torch.arange(count * per, dtype=torch.int32).view(count, per)
    inputs = nn.AttentionInputs(
        slots,
        table,
        torch.arange(count + 1, dtype=torch.int32) * length,
        torch.full((count,), length, dtype=torch.int32),
    )
    return (
        torch.from_numpy(np.ascontiguousarray(sequences)).reshape(-1),
        positions,
        [k for k, _ in caches],
        [v for _, v in caches],
        [inputs] * len(model.kv_groups()),
        torch.zeros(1, dtype=torch.int32),
    )
