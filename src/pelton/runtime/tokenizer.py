"""The tokenizer of an engine: ``tokenizer.json``, special tokens and chat template of its directory.

Nothing heavy is imported or read before it is used: an engine's ``tokenizer.json`` may take longer to
parse than its weights to map.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pelton.errors import EngineError, RequestError

if TYPE_CHECKING:
    import tokenizers

    from pelton.runtime.chat_template import ChatTemplate


class SpecialTokens(msgspec.Struct, frozen=True, kw_only=True):
    """``special_tokens.json``. Token texts are what the chat template sees."""

    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    pad_token: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    add_bos: bool = False
    """``encode`` puts the beginning-of-sequence token first, unless it is there already."""


class Tokenizer:
    """Text to token ids and back. Safe to use from several threads."""

    def __init__(
        self,
        source: Path | tokenizers.Tokenizer,
        special: SpecialTokens | None = None,
        chat_template: str | None = None,
    ) -> None:
        self.special = special or SpecialTokens()
        self.chat_template = chat_template
        self._source = source
        self._lock = threading.Lock()
        self._backend: tokenizers.Tokenizer | None = None
        self._template: ChatTemplate | None = None

    @classmethod
    def from_dir(cls, directory: Path | str) -> Tokenizer:
        """Open an engine's ``tokenizer/``. Raises ``EngineError`` when files are missing or damaged."""
        directory = Path(directory)
        source, special_path = directory / "tokenizer.json", directory / "special_tokens.json"
        for path in (source, special_path):
            if not path.is_file():
                raise EngineError(f"{path} is missing; build the engine again")
        try:
            special = msgspec.json.decode(special_path.read_bytes(), type=SpecialTokens)
        except msgspec.DecodeError as error:
            raise EngineError(f"{special_path} is damaged ({error}); build the engine again") from None
        template_path = directory / "chat_template.jinja"
        template = template_path.read_text(encoding="utf-8") if template_path.is_file() else None
        return cls(source, special, template)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The ``tokenizers`` object, loaded at first use."""
        if self._backend is None:
            with self._lock:
                if self._backend is None:
                    self._backend = self._load()
        return self._backend

    def _load(self) -> tokenizers.Tokenizer:
        if not isinstance(self._source, Path):
            return self._source
        import tokenizers

        try:
            return tokenizers.Tokenizer.from_file(str(self._source))
        except Exception as error:  # the library raises plain Exception
            raise EngineError(f"{self._source} cannot be read ({error}); build the engine again") from None

    @property
    def bos_token_id(self) -> int | None:
        return self.special.bos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.special.eos_token_ids

    @cached_property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows, added tokens included; a model's vocabulary may be padded beyond."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. Special tokens written out in the text are recognised.

        ``add_special_tokens`` adds what the model expects around a plain prompt; a chat template writes
        its own, so text rendered by one is encoded without.
        """
        # A lone surrogate (half a JSON "\\ud83d" escape) is no text; the library would refuse it.
        text = text.encode("utf-8", "replace").decode("utf-8")
        ids = list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        bos = self.special.bos_token_id
        if add_special_tokens and self.special.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; ids the tokenizer does not know have none."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """One token as text by itself, special ones written out: for log-probability listings."""
        return self.decode([token_id], skip_special_tokens=False)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation; encode it with ``add_special_tokens=False``.

        ``variables`` are the template's own, such as ``enable_thinking``; they may also replace the
        special tokens. Raises ``RequestError`` when the model has no template or the template refuses the
        messages.
        """
        if self.chat_template is None:
            raise RequestError(
                "this model has no chat template; use the completions interface with a plain prompt",
                param="messages",
            )
        if self._template is None:
            from pelton.runtime.chat_template import ChatTemplate

            self._template = ChatTemplate(self.chat_template)
        tokens = {
            name: getattr(self.special, name)
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if getattr(self.special, name) is not None
        }
        given = {
            "tools": tools,
            **tokens,
            **(variables or {}),
            "add_generation_prompt": add_generation_prompt,
        }
        return self._template.render(messages, given)
