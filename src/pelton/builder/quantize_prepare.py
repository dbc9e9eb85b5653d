"""What quantising a checkpoint by a recipe needs, checked before any weight is read: layers take long."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pelton import nn
from pelton.builder.calibration import calibration_sequences
from pelton.builder.quantized_view import Target, draft, targets
from pelton.builder.text import Ids
from pelton.models.checkpoint import Checkpoint
from pelton.quant.config import QuantConfig
from pelton.version import __version__


@dataclass(frozen=True)
class Prepared:
    """A checkpoint and a recipe that go together."""

    model: nn.CausalLM
    """On the meta device."""
    targets: dict[str, Target]
    """What is quantised, by parameter name."""
    notes: tuple[str, ...]
    """Sentences on what is other than was asked for."""
    sequences: Ids | None
    """The calibration text (sequences, length); None: the recipe sees none."""


def prepare(checkpoint: Checkpoint, config: QuantConfig) -> Prepared:
    """Raises what can be found without reading a weight: ``ConfigError`` for a recipe or calibration text
    that cannot be used, ``CheckpointError`` for a model that cannot be quantised."""
    config.check()
    limit = draft(checkpoint).max_position_embeddings
    length = config.calibration.length if config.calibrated else 2
    model = draft(checkpoint, max_seq_len=min(length, limit))
    found, notes = targets(model, config)
    if not config.calibrated:
        return Prepared(model, found, notes, None)
    if length > limit:
        notes += (f"calibration sequences have {limit} tokens, the model's limit, not {length}",)
    sequences = calibration_sequences(config.calibration, checkpoint, model)
    return Prepared(model, found, notes, sequences)


def digest(checkpoint: Checkpoint, config: QuantConfig) -> str:
    """Of all that a quantisation's results follow from."""
    made = hashlib.blake2b(digest_size=16)
    for part in (__version__, checkpoint.fingerprint()):
        made.update(part.encode() + b"\0")
    made.update(msgspec.json.encode(config, order="sorted"))
    if config.calibrated and config.calibration.text is not None:
        made.update(Path(config.calibration.text).read_bytes())
    return made.hexdigest()
