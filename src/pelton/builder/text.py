"""Texts that models are calibrated and measured on, as token ids."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pelton.errors import ConfigError
from pelton.models.checkpoint import Checkpoint

BUILT_IN = "pydoc_data.topics"

Ids = npt.NDArray[np.int32]


class Text(NamedTuple):
    """A text as a model reads it."""

    ids: Ids
    """Without special tokens."""
    first: Ids
    """What the tokenizer puts before a text, and every sequence cut from it begins with. Models that are
    trained with such a token (Gemma) predict badly without it, and have other activations."""

    def head(self, tokens: int) -> Text:
        """At most so many of its tokens."""
        return Text(self.ids[:tokens], self.first)


def built_in(half: int) -> str:
    """Prose on Python's syntax, the same in every installation of one version of Python. Half 0 is for
    calibration, half 1 for measuring: topics repeat parts of others, and no paragraph is in both."""
    from pydoc_data import topics

    # A topic may have two names.
    found: Mapping[str, str] = {text: name for name, text in sorted(topics.topics.items(), reverse=True)}
    texts = sorted(found, key=lambda text: found[text])
    total, seen = sum(map(len, texts)), 0
    parts: tuple[list[str], list[str]] = ([], [])
    for text in texts:
        parts[2 * seen >= total].append(text)
        seen += len(text)
    if half == 1:
        return "\n".join(parts[1])
    measured = {paragraph for text in parts[1] for paragraph in paragraphs(text)}
    return "\n\n".join(p for text in parts[0] for p in paragraphs(text) if p not in measured)


def paragraphs(text: str) -> list[str]:
    """What empty lines separate."""
    return [part.strip("\n") for part in text.split("\n\n")]


def read_text(path: Path, setting: str) -> str:
    """A file of the user's. Raises ``ConfigError`` naming the ``setting``."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{setting} {path} cannot be read as text: {why}") from error


def encode(text: str, tokenizer: Path, vocab_size: int, *, name: str) -> Text:
    """``text`` in tokens of the tokenizer in the folder ``tokenizer``.

    Raises ``ConfigError`` where it cannot be used, or has tokens that the model does not."""
    from tokenizers import Tokenizer

    try:
        run = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode
        plain, framed = (run("a", add_special_tokens=special).ids for special in (False, True))
    except Exception as error:  # whatever the library raises
        raise ConfigError(
            f"the model's tokenizer cannot be used, so it cannot be run on text ({error})"
        ) from error
    ids = np.array(run(text, add_special_tokens=False).ids, np.int32)
    if ids.size and ids.max() >= vocab_size:
        raise ConfigError(
            f"{name} has the token {ids.max()} in the model's tokenizer, and the model only {vocab_size}"
        )
    # Some put tokens behind a text too.
    before = next(i for i in range(len(framed) + 1) if framed[i : i + len(plain)] == plain)
    return Text(ids, np.array(framed[:before], np.int32))


def checkpoint_text(checkpoint: Checkpoint, text: str, vocab_size: int, *, name: str) -> Text:
    """``text`` in tokens of the checkpoint's tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.write_tokenizer(Path(folder))
        return encode(text, Path(folder), vocab_size, name=name)
