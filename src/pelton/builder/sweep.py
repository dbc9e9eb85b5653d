"""Recipes side by side on one model: bits, size, and what they cost on text.

Quality is of the model in float32 on the quantised weights, its inputs rounded where the recipe says so: what
the recipe does, apart from what an engine's kernels add (``pelton eval`` measures engines). Speed is of
engines.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from pelton.builder.build import build
from pelton.builder.evaluation import (
    WINDOW,
    Float32,
    Run,
    compare_on_text,
    eager_config,
    exact_model,
    windows,
)
from pelton.builder.quantize import quantize
from pelton.builder.quantize_prepare import prepare
from pelton.builder.quantized_view import QuantizedCheckpoint, draft, round_in_stream
from pelton.builder.text import BUILT_IN, built_in, checkpoint_text
from pelton.dtypes import BLOCK_TYPES, is_dense
from pelton.engine.batch import InputBatch
from pelton.engine.config import BuildConfig
from pelton.engine.pieces import Piece, make_batch
from pelton.engine.session import Session
from pelton.models.checkpoint import Checkpoint
from pelton.quant.config import QuantConfig, describe

#: Tokens read of the text.
TOKENS = 4096
#: Decode steps that are timed, and the longest sequence of that engine.
_STEPS, _LENGTH = 24, 512


class SweepRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One recipe."""

    recipe: str
    what: str
    """In words."""
    bits: float
    """Of a quantised value, its share of the scales included."""
    nbytes: int
    """Of the quantised weights."""
    perplexity: float
    perplexity_unquantised: float
    kl: float
    """From the unquantised model, nats a token."""
    top1: float
    """Share of tokens whose likeliest successor is the same."""
    tokens: int
    seconds: float
    """To quantise."""
    decode_ms: float | None = None
    """Median decode step of an engine on this machine, one sequence."""


def sweep(
    checkpoint: Checkpoint,
    configs: Sequence[QuantConfig],
    *,
    tokens: int = TOKENS,
    window: int = WINDOW,
    speed: bool = False,
    note: Callable[[str], None] | None = None,
) -> Iterator[SweepRow]:
    """A row for each recipe, as it is done; ``speed`` builds an engine of each too.

    Raises what quantising raises; all recipes, and what they need, are checked before the first one runs.
    """
    for config in configs:
        prepare(checkpoint, config)
    say = note or (lambda text: None)
    exact = eager_config(checkpoint, window)
    text = checkpoint_text(checkpoint, built_in(1), exact.model.vocab_size, name=BUILT_IN)
    batches = windows(text.head(tokens), exact, window)
    with tempfile.TemporaryDirectory(prefix="pelton-sweep-") as folder:
        say("the unquantised model")
        reference = _kept(checkpoint, batches, Path(folder) / "reference.npy", window)
        for config in configs:
            caches = f" (its {config.kv} KV caches are float32 here)" if config.kv else ""
            say((config.name or describe(config)) + caches)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                started = time.perf_counter()
                view = _quantised(checkpoint, config, Path(scratch))
                seconds = time.perf_counter() - started
                model = exact_model(view, exact, window, hold=True, round_inputs=True)
                found = compare_on_text(batches, model.run, reference.replay(), name=BUILT_IN)
                del model
                nbytes, values = _size(view)
                yield SweepRow(
                    recipe=config.name,
                    what=describe(config),
                    bits=round(8 * nbytes / values, 3),
                    nbytes=nbytes,
                    perplexity=found.perplexity,
                    perplexity_unquantised=found.perplexity_unquantised,
                    kl=found.kl_mean,
                    top1=found.top1_agreement,
                    tokens=found.tokens,
                    seconds=round(seconds, 1),
                    decode_ms=_decode_ms(view, Path(scratch) / "engine", say) if speed else None,
                )


def _quantised(checkpoint: Checkpoint, config: QuantConfig, scratch: Path) -> QuantizedCheckpoint:
    if not config.calibrated:
        return round_in_stream(checkpoint, config)
    return quantize(checkpoint, config, scratch / "layers")[0]


class _Kept:
    """Logits of each batch, in a file: those of a whole text are large."""

    def __init__(self, logits: Float32, sizes: Sequence[int]) -> None:
        self._logits, self._sizes = logits, sizes

    def replay(self) -> Run:
        """What gives the logits of one batch after another."""
        bounds = iter(np.cumsum(self._sizes).tolist())
        start = 0

        def following(batch: InputBatch) -> Float32:
            nonlocal start
            start, first = next(bounds), start
            return np.asarray(self._logits[first:start])

        return following


def _kept(checkpoint: Checkpoint, batches: Sequence[InputBatch], path: Path, window: int) -> _Kept:
    config = eager_config(checkpoint, window)
    model = exact_model(checkpoint, config, window, hold=True)
    sizes = [batch.input_ids_T.size for batch in batches]
    shape = (sum(sizes), config.model.vocab_size)
    kept = np.lib.format.open_memmap(path, "w+", np.float32, shape)
    start = 0
    for batch, size in zip(batches, sizes, strict=True):
        kept[start : start + size] = model.run(batch)
        start += size
    return _Kept(kept, sizes)


def _size(view: QuantizedCheckpoint) -> tuple[int, int]:
    """Bytes and values of the quantised weights."""
    nbytes = values = 0
    for info in view.changed.values():
        if not is_dense(info.quant):
            rows, columns = info.shape
            nbytes += rows * BLOCK_TYPES[info.quant].row_bytes(columns)
            values += rows * columns
    return nbytes, values


def _decode_ms(view: QuantizedCheckpoint, engine: Path, say: Callable[[str], None]) -> float:
    length = min(_LENGTH, draft(view).max_position_embeddings)
    limits = BuildConfig(max_batch_size=1, max_seq_len=length, max_num_tokens=length, timing=False)
    report = build(view, limits, output=engine, check=False)
    lacking = {
        info.quant for info in view.changed.values() if not is_dense(info.quant)
    } - report.stored.keys()
    if lacking:
        say(
            f"no kernel here takes {', '.join(sorted(lacking))}: the time is of the engine's "
            f"{', '.join(sorted(q for q in report.stored if not is_dense(q)))}"
        )
    with Session(engine, trust=True) as session:
        size = session.config.build.block_size
        assert size
        blocks = np.arange(-(-length // size), dtype=np.int32)
        took = []
        for position in range(min(_STEPS, length)):
            piece = Piece(tokens=np.array([position + 5], np.int32), start=position, blocks=blocks)
            batch = make_batch([piece], session.config)
            started = time.perf_counter()
            session.run(batch)
            took.append(time.perf_counter() - started)
    return round(1e3 * statistics.median(took[4:]), 2)
