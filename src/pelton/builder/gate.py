"""The accuracy gate: an engine's predictions on text beside the unquantised model's.

The reference is the checkpoint's own model: dequantised weights, float32 throughout, a float32 KV cache.
``evaluation.py`` says how text is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pelton.builder.evaluation import compare_on_text, exact_model, windows
from pelton.builder.report import Evaluation
from pelton.builder.text import BUILT_IN, Text, built_in, encode, read_text
from pelton.engine.session import Session
from pelton.errors import BuildError, ConfigError
from pelton.models.checkpoint import Checkpoint

#: Tokens read unless said otherwise.
TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class QualityGate:
    """What is required of an engine on text, and which text. Nothing of it changes the engine's plan."""

    max_kl: float | None = None
    """Largest mean KL divergence from the unquantised model, nats per token."""
    max_ppl_increase: float | None = None
    """Largest increase of perplexity over the unquantised model's, as a fraction: 0.02 is 2 %."""
    text: str | None = None
    """What to read; None: the second half of the documentation topics of Python's standard library."""
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


def evaluate_text(gate: QualityGate, tokenizer: Path, session: Session, checkpoint: Checkpoint) -> Evaluation:
    """Read the gate's text with both. Raises ``BuildError`` beyond the gate, ``ConfigError`` for a text
    that is too short."""
    config = session.config
    tokens = _tokens(gate, tokenizer, config.model.vocab_size)
    batches = windows(tokens, config)
    reference = exact_model(checkpoint, config)
    found = compare_on_text(
        batches,
        lambda batch: session.run(batch).logits_NV,
        reference.run,
        name=gate.name,
        gate=_required(gate),
    )
    hold(gate, found)
    return found


def _tokens(gate: QualityGate, tokenizer: Path, vocab_size: int) -> Text:
    text = built_in(1) if gate.text is None else gate.text
    # A token is rarely more than some letters: no need to encode a whole book.
    found = encode(text[: 16 * gate.tokens], tokenizer, vocab_size, name=gate.name).head(gate.tokens)
    if found.ids.size < 2:
        raise ConfigError(f"{gate.name} has {found.ids.size} tokens of this model; give a text with more")
    return found


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
        given = {"text": read_text(eval_text, "eval_text"), "name": eval_text.name}
    gate = QualityGate(
        max_kl=max_kl,
        max_ppl_increase=max_ppl_increase,
        tokens=TOKENS if eval_tokens is None else eval_tokens,
        **given,
    )
    gate.check()
    return gate
