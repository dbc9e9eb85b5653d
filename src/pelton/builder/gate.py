"""The accuracy gate: an engine's predictions on text beside the unquantised model's.

The reference is the checkpoint's own model: dequantised weights, float32 throughout, a float32 KV cache.
Both read the same text in windows, each a sequence of its own, and predict every next token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pelton.builder.check import divergence, next_token_loss
from pelton.builder.eager import EagerReference
from pelton.builder.facts import model_recipes
from pelton.builder.report import Evaluation
from pelton.engine.batch import InputBatch
from pelton.engine.config import EngineConfig
from pelton.engine.pieces import Piece, make_batch
from pelton.engine.session import Session
from pelton.errors import BuildError, ConfigError
from pelton.models.checkpoint import Checkpoint
from pelton.models.registry import create_model

#: Longest sequence read, tokens: enough context for text, and its logits stay small.
WINDOW = 256
#: Tokens read unless said otherwise.
TOKENS = 1024
BUILT_IN = "pydoc_data.topics"


@dataclass(frozen=True, kw_only=True)
class QualityGate:
    """What is required of an engine on text, and which text. Nothing of it changes the engine's plan."""

    max_kl: float | None = None
    """Largest mean KL divergence from the unquantised model, nats per token."""
    max_ppl_increase: float | None = None
    """Largest increase of perplexity over the unquantised model's, as a fraction: 0.02 is 2 %."""
    text: str | None = None
    """What to read; None: the documentation topics of Python's standard library."""
    name: str = BUILT_IN
    """The text's name in the report."""
    tokens: int = TOKENS
    """How many of its tokens to read, at most."""

    def check(self) -> None:
        """Raise ``ConfigError`` for a setting that cannot be meant."""
        for name in ("max_kl", "max_ppl_increase"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(f"{name} must be a number of at least 0, not {value}")
        if self.tokens < 2:
            raise ConfigError(f"eval_tokens must be at least 2, not {self.tokens}")


def evaluation_blocks(config: EngineConfig) -> int:
    """KV blocks that ``evaluate_text`` needs in its session."""
    size = config.build.block_size
    assert size
    return -(-_window(config) // size)


def evaluate_text(gate: QualityGate, tokenizer: Path, session: Session, checkpoint: Checkpoint) -> Evaluation:
    """Read the gate's text with both. Raises ``BuildError`` beyond the gate, ``ConfigError`` for a text
    that is too short."""
    config = session.config
    tokens = _tokens(gate, tokenizer, config.model.vocab_size)
    batches = _windows(tokens, config)
    exact = msgspec.structs.replace(config, build=msgspec.structs.replace(config.build, kv_dtype="float32"))
    assert config.build.max_seq_len
    model = create_model(checkpoint.config, max_seq_len=config.build.max_seq_len)
    recipes = model_recipes(model, checkpoint.source)
    reference = EagerReference(model, recipes, checkpoint.read, exact, evaluation_blocks(config))
    kl, same, losses, exact_losses = [], [], [], []
    for batch in batches:
        ours, theirs = session.run(batch).logits_NV, reference.run(batch)
        kl.append(divergence(theirs, ours))
        same.append(theirs.argmax(-1) == ours.argmax(-1))
        losses.append(next_token_loss(ours, batch.input_ids_T))
        exact_losses.append(next_token_loss(theirs, batch.input_ids_T))
    found = Evaluation(
        text=gate.name,
        tokens=tokens.size,
        kl_mean=float(np.concatenate(kl).mean()),
        kl_max=float(np.concatenate(kl).max()),
        top1_agreement=float(np.concatenate(same).mean()),
        perplexity=_perplexity(losses),
        perplexity_unquantised=_perplexity(exact_losses),
        gate=_required(gate),
    )
    hold(gate, found)
    return found


def _tokens(gate: QualityGate, tokenizer: Path, vocab_size: int) -> npt.NDArray[np.int32]:
    from tokenizers import Tokenizer

    text = _built_in(8 * gate.tokens) if gate.text is None else gate.text
    try:
        encode = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode
    except Exception as error:  # whatever the library raises
        raise ConfigError(
            f"the model's tokenizer cannot be used, so its quality on text cannot be measured ({error})"
        ) from error
    # A token is rarely more than some letters: no need to encode a whole book.
    ids = np.array(encode(text[: 16 * gate.tokens], add_special_tokens=False).ids[: gate.tokens], np.int32)
    if ids.size < 2 or ids.max() >= vocab_size:
        raise ConfigError(f"{gate.name} has {ids.size} tokens of this model; give a text with more")
    return ids


def _built_in(characters: int) -> str:
    """Prose on Python's syntax: the same in every installation of one version of Python."""
    from pydoc_data import topics

    found: Mapping[str, str] = topics.topics
    parts: list[str] = []
    for name in sorted(found):
        parts.append(found[name])
        characters -= len(found[name])
        if characters < 0:
            break
    return "\n".join(parts)


def _window(config: EngineConfig) -> int:
    build = config.build
    assert build.max_num_tokens and build.max_seq_len
    return min(WINDOW, build.max_num_tokens, build.max_seq_len)


def _windows(tokens: npt.NDArray[np.int32], config: EngineConfig) -> list[InputBatch]:
    """Steps of one sequence each."""
    size, table = _window(config), np.arange(evaluation_blocks(config), dtype=np.int32)
    pieces = [tokens[i : i + size] for i in range(0, tokens.size, size)]
    return [make_batch([Piece(tokens=p, start=0, blocks=table)], config) for p in pieces if p.size > 1]


def _perplexity(losses: list[npt.NDArray[np.float64]]) -> float:
    return float(np.exp(np.concatenate(losses).mean()))


def _required(gate: QualityGate) -> str:
    parts = []
    if gate.max_kl is not None:
        parts.append(f"KL <= {gate.max_kl:g}")
    if gate.max_ppl_increase is not None:
        parts.append(f"perplexity <= {1 + gate.max_ppl_increase:g} x the unquantised")
    return ", ".join(parts)


def hold(gate: QualityGate, found: Evaluation) -> None:
    """Raise ``BuildError`` when ``found`` is beyond ``gate``; written so that NaN is."""
    where = f"over {found.tokens} tokens of {found.text}"
    out = "build with more exact settings (such as activations float32, or a larger checkpoint)"
    if gate.max_kl is not None and not found.kl_mean <= gate.max_kl:
        raise BuildError(
            f"the engine's KL divergence from the unquantised model is {found.kl_mean:.4g} {where}, beyond "
            f"max_kl {gate.max_kl:g}; {out}, or allow more; nothing is written"
        )
    limit = gate.max_ppl_increase
    if limit is not None and not found.perplexity <= (1 + limit) * found.perplexity_unquantised:
        increase = found.perplexity / found.perplexity_unquantised - 1
        raise BuildError(
            f"the engine's perplexity is {found.perplexity:.4g} {where} and the unquantised model's "
            f"{found.perplexity_unquantised:.4g}: {increase:.2%} more, beyond max_ppl_increase {limit:g}; "
            f"{out}, or allow more; nothing is written"
        )


def read_gate(
    max_kl: float | None, max_ppl_increase: float | None, eval_text: Path | None, eval_tokens: int | None
) -> QualityGate | None:
    """The gate that command-line settings ask for; None when they ask for none. Raises ``ConfigError``."""
    if max_kl is None and max_ppl_increase is None and eval_text is None and eval_tokens is None:
        return None
    given: dict[str, Any] = {}
    if eval_text is not None:
        try:
            given = {"text": eval_text.read_text("utf-8"), "name": eval_text.name}
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(f"eval_text {eval_text} cannot be read as text: {why}") from error
    gate = QualityGate(
        max_kl=max_kl,
        max_ppl_increase=max_ppl_increase,
        tokens=TOKENS if eval_tokens is None else eval_tokens,
        **given,
    )
    gate.check()
    return gate
