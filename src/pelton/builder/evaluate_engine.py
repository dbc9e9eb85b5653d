"""An engine on text, through its own session: its perplexity, and how far it is from another model.

The other is an engine, or a checkpoint: then its own model in float32, on its dequantised weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from pelton.builder.evaluation import (
    WINDOW,
    Run,
    blocks_of,
    compare_on_text,
    exact_model,
    perplexity,
    window_of,
    windows,
)
from pelton.builder.report import Evaluation
from pelton.builder.report_file import keep_quality
from pelton.builder.text import BUILT_IN, built_in, encode
from pelton.engine.artifact import is_engine, open_engine
from pelton.engine.config import EngineConfig
from pelton.engine.session import Session
from pelton.errors import ConfigError
from pelton.models.checkpoint import open_checkpoint

#: Tokens read unless said otherwise.
TOKENS = 8192

Step = Callable[[int, int], None]


class TextResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was found; all but the first fields only where there was something to compare with."""

    engine: str
    text: str
    tokens: int
    """That were read; all but the first of each window were predicted."""
    window: int
    perplexity: float
    against: str = ""
    perplexity_against: float | None = None
    kl_mean: float | None = None
    """KL(against || engine) per token, nats."""
    kl_max: float | None = None
    top1_agreement: float | None = None

    def rows(self) -> list[tuple[str, str]]:
        """For people."""
        found = [
            ("text", f"{self.tokens} tokens of {self.text}, in windows of {self.window}"),
            ("perplexity", f"{self.perplexity:.4f}"),
        ]
        if self.perplexity_against is not None:
            more = self.perplexity / self.perplexity_against - 1
            found += [
                (f"of {self.against}", f"{self.perplexity_against:.4f} ({more:+.2%} here)"),
                ("KL", f"{self.kl_mean:.5f} nats a token (largest {self.kl_max:.3f})"),
                ("top-1 agreement", f"{self.top1_agreement:.2%}"),
            ]
        return found


def evaluate(
    engine: Path,
    *,
    text: str | None = None,
    name: str = BUILT_IN,
    tokens: int = TOKENS,
    window: int = WINDOW,
    against: Path | None = None,
    trust: bool = False,
    progress: Step | None = None,
) -> TextResult:
    """Read at most ``tokens`` of ``text`` (None: the second half of Python's documentation topics).

    Raises ``ConfigError`` for a text that is too short, or models of different vocabularies, and what opening
    them raises.
    """
    if tokens < 2 or window < 2:
        raise ConfigError(f"tokens and window must be at least 2, not {tokens} and {window}")
    opened = open_engine(engine)
    config = opened.config
    content = built_in(1) if text is None else text
    read = encode(content[: 32 * tokens], opened.tokenizer_path, config.model.vocab_size, name=name)
    read = read.head(tokens)
    if read.ids.size < 2:
        raise ConfigError(f"{name} has {read.ids.size} tokens of this model; give a text with more")
    step = progress or (lambda done, total: None)
    with _session(engine, config, window, trust) as run:
        if against is None:
            batches = windows(read, config, window)
            found: dict[str, Any] = {"perplexity": perplexity(batches, _told(run, step, len(batches)))}
        else:
            with _other(against, config, window, trust) as (reference, other):
                window = min(window_of(config, window), window_of(other, window))
                batches = windows(read, config, window)
                compared = compare_on_text(batches, _told(run, step, len(batches)), reference, name=name)
            found = {
                "perplexity": compared.perplexity,
                "against": against.name,
                "perplexity_against": compared.perplexity_unquantised,
                "kl_mean": compared.kl_mean,
                "kl_max": compared.kl_max,
                "top1_agreement": compared.top1_agreement,
            }
    total = sum(batch.input_ids_T.size for batch in batches)
    return TextResult(engine=engine.name, text=name, tokens=total, window=window_of(config, window), **found)


def _told(run: Run, step: Step, total: int) -> Run:
    done = 0

    def counted(batch: Any) -> Any:
        nonlocal done
        step(done, total)
        done += 1
        return run(batch)

    return counted


@contextmanager
def _session(engine: Path, config: EngineConfig, window: int, trust: bool) -> Iterator[Run]:
    with Session(engine, kv_blocks=blocks_of(config, window), trust=trust) as session:
        yield lambda batch: session.run(batch).logits_NV


@contextmanager
def _other(path: Path, config: EngineConfig, window: int, trust: bool) -> Iterator[tuple[Run, EngineConfig]]:
    if is_engine(path):
        other = open_engine(path).config
        _check_vocabulary(path, other.model.vocab_size, config)
        for name in ("block_size", "max_seq_len"):
            its, own = getattr(other.build, name), getattr(config.build, name)
            if its != own:
                raise ConfigError(
                    f"{path} has {name} {its}, and {config.model.name} {own}; build one with the other's"
                )
        its, own = len(other.model.kv_groups), len(config.model.kv_groups)
        if its != own:
            raise ConfigError(
                f"{path} has {its} kinds of attention windows, and {config.model.name} {own}: they cannot be "
                "given the same steps"
            )
        with _session(path, other, window, trust) as run:
            yield run, other
        return
    checkpoint = open_checkpoint(path)
    model = exact_model(checkpoint, config, window)
    _check_vocabulary(path, int(checkpoint.config.get("vocab_size", config.model.vocab_size)), config)
    yield model.run, config


def _check_vocabulary(path: Path, size: int, config: EngineConfig) -> None:
    if size != config.model.vocab_size:
        raise ConfigError(
            f"{path} has a vocabulary of {size}, and {config.model.name} one of {config.model.vocab_size}: "
            "their predictions cannot be compared"
        )


def keep(engine: Path, result: TextResult) -> None:
    """Put ``result`` into the engine's ``report.json``, where ``inspect`` and ``diff`` find it.

    Raises ``ConfigError`` for a result that was compared with nothing.
    """
    if result.kl_mean is None or result.kl_max is None or result.top1_agreement is None:
        raise ConfigError("only a comparison is kept in an engine's report; say against what")
    assert result.perplexity_against is not None
    evaluation = Evaluation(
        text=result.text,
        tokens=result.tokens,
        kl_mean=result.kl_mean,
        kl_max=result.kl_max,
        top1_agreement=result.top1_agreement,
        perplexity=result.perplexity,
        perplexity_unquantised=result.perplexity_against,
        gate="",
    )
    keep_quality(engine, evaluation=msgspec.to_builtins(evaluation))
