"""Models on text: perplexity, and how far one's predictions are from another's.

The text is read in windows, each a sequence of its own, and every next token in them is predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from pelton.builder.check import divergence, next_token_loss
from pelton.builder.eager import EagerReference
from pelton.builder.facts import model_config, model_recipes
from pelton.builder.quantized_view import draft, places
from pelton.builder.report import Evaluation
from pelton.builder.text import Text
from pelton.engine.batch import InputBatch
from pelton.engine.config import BuildConfig, EngineConfig, MemoryPlan
from pelton.engine.pieces import Piece, make_batch, most_rows
from pelton.models.checkpoint import Checkpoint
from pelton.models.registry import architecture_of, create_model
from pelton.models.transformers_import.model import ImportedCausalLM

#: Longest sequence read unless said otherwise, tokens: enough context for text, and its logits stay small.
WINDOW = 256

Float32 = npt.NDArray[np.float32]
Run = Callable[[InputBatch], Float32]


def window_of(config: EngineConfig, wanted: int = WINDOW) -> int:
    """Tokens of a window: at most what a sequence may have, and a step, each with its logits."""
    build = config.build
    assert build.max_num_tokens and build.max_seq_len
    return min(wanted, build.max_num_tokens, build.max_seq_len, most_rows(config))


def blocks_of(config: EngineConfig, wanted: int = WINDOW) -> int:
    """KV blocks that a session needs to read windows."""
    size = config.build.block_size
    assert size
    return -(-window_of(config, wanted) // size)


def windows(text: Text, config: EngineConfig, wanted: int = WINDOW) -> list[InputBatch]:
    """Steps of one sequence each, that begins as the tokenizer begins a text."""
    size, table = window_of(config, wanted), np.arange(blocks_of(config, wanted), dtype=np.int32)
    own = max(1, size - text.first.size)
    pieces = [
        np.concatenate([text.first, text.ids[i : i + own]])[:size] for i in range(0, text.ids.size, own)
    ]
    return [make_batch([Piece(tokens=p, start=0, blocks=table)], config) for p in pieces if p.size > 1]


def perplexity(batches: Sequence[InputBatch], run: Run) -> float:
    """exp of the mean loss of every token but each window's first."""
    losses = [next_token_loss(run(batch), batch.input_ids_T) for batch in batches]
    return float(np.exp(np.concatenate(losses).mean()))


def compare_on_text(
    batches: Sequence[InputBatch], run: Run, reference: Run, *, name: str, gate: str = ""
) -> Evaluation:
    """``run``'s predictions beside ``reference``'s, each called with one batch after another."""
    kl, same, losses, exact = [], [], [], []
    for batch in batches:
        # A session's array is valid until its next run.
        ours, theirs = run(batch), reference(batch)
        kl.append(divergence(theirs, ours))
        same.append(theirs.argmax(-1) == ours.argmax(-1))
        losses.append(next_token_loss(ours, batch.input_ids_T))
        exact.append(next_token_loss(theirs, batch.input_ids_T))
    found = np.concatenate(kl)
    return Evaluation(
        text=name,
        tokens=sum(batch.input_ids_T.size for batch in batches),
        kl_mean=float(found.mean()),
        kl_max=float(found.max()),
        top1_agreement=float(np.concatenate(same).mean()),
        perplexity=float(np.exp(np.concatenate(losses).mean())),
        perplexity_unquantised=float(np.exp(np.concatenate(exact).mean())),
        gate=gate,
    )


def eager_config(checkpoint: Checkpoint, window: int = WINDOW) -> EngineConfig:
    """What reading windows with the checkpoint's own model needs of an engine's configuration."""
    window = min(window, draft(checkpoint).max_position_embeddings)
    # Which layers share a KV group depends on the length.
    model = draft(checkpoint, max_seq_len=window)
    build = BuildConfig(
        max_batch_size=1, max_seq_len=window, max_num_tokens=window, block_size=16, kv_dtype="float32"
    )
    described = model_config(checkpoint, model, architecture_of(checkpoint.config), None)
    memory = MemoryPlan(weights=0, arena=0, workspace=0, kv_bytes_per_token=0)
    return EngineConfig(model=described, build=build, memory=memory)


def exact_model(
    checkpoint: Checkpoint,
    config: EngineConfig,
    window: int = WINDOW,
    *,
    hold: bool = False,
    round_inputs: bool = False,
) -> EagerReference:
    """The checkpoint's model in float32 on its dequantised weights, with a float32 KV cache.

    ``round_inputs``: of its layers, where a quantised checkpoint says so. ``hold``: as ``EagerReference``'s.
    """
    exact = msgspec.structs.replace(config, build=msgspec.structs.replace(config.build, kv_dtype="float32"))
    assert config.build.max_seq_len
    model = create_model(checkpoint.config, max_seq_len=config.build.max_seq_len)
    recipes = model_recipes(model, checkpoint.source)
    activations = {}
    if round_inputs and not isinstance(model, ImportedCausalLM):
        found = {name: checkpoint.activation_quant(place.tensor) for name, place in places(model).items()}
        activations = {name: quant for name, quant in found.items() if quant is not None}
    blocks = blocks_of(config, window)
    return EagerReference(model, recipes, checkpoint.read, exact, blocks, hold=hold, activations=activations)
