"""Incremental detokenising: text as tokens arrive, whose pieces join to the text of all tokens.

Per decoder family a ``_Joiner`` turns tokens into text exactly as the ``tokenizers`` library does, but
one token at a time and in linear time:

- byte level (GPT-2, Llama 3, Qwen): tokens are byte strings; a UTF-8 decoder holds back unfinished
  characters;
- byte fallback (Llama 2, Mistral, Gemma): tokens are text, except runs of ``<0xNN>`` tokens. A run is
  text if it is valid UTF-8 as a whole and otherwise one U+FFFD per byte, so it is held until it ends;
- anything else: differences of the library's own decoding of a window of tokens.

An answer continues its prompt, so a decoder's habit of dropping a text's very first space applies only
where the prompt has no text.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from pelton.runtime.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class IncrementalDetokenizer:
    """The text of one answer. ``push`` tokens as they come, ``finish`` once.

    The deltas join to what ``Tokenizer.decode`` would add to the prompt's text for the same ids.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._vocabulary = _vocabulary(tokenizer)
        self._skip_special_tokens = skip_special_tokens
        at_start = not any(self._vocabulary.text_of(i, skip_special_tokens) for i in prompt_ids)
        self._joiner = self._vocabulary.new_joiner(at_start)

    def push(self, ids: Sequence[int]) -> str:
        """Text that ``ids`` make certain; it may belong to earlier tokens and come later than they."""
        tokens = [self._vocabulary.text_of(i, self._skip_special_tokens) for i in ids]
        return "".join(self._joiner.push(token) for token in tokens if token is not None)

    def finish(self) -> str:
        """What was held back."""
        return self._joiner.finish()


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes that one token stands for by itself (part of a character for some); special tokens are
    written out, unknown ids stand for nothing. For log-probability listings."""
    return _vocabulary(tokenizer).bytes_of(token_id)


class _Joiner(Protocol):
    def push(self, token: str) -> str: ...

    def finish(self) -> str: ...


class _ByteLevelJoiner:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: str) -> str:
        return self._decoder.decode(_token_bytes(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _ByteFallbackJoiner:
    """``replacements`` are applied to each token; ``strip`` is the character that the text's start loses,
    at most ``strip_count`` times."""

    def __init__(self, replacements: tuple[tuple[str, str], ...], strip: str, strip_count: int) -> None:
        self._replacements = replacements
        self._strip = strip
        self._strip_left = strip_count
        self._run = bytearray()

    def push(self, token: str) -> str:
        for old, new in self._replacements:
            token = token.replace(old, new)
        byte = _fallback_byte(token)
        if byte is not None:
            self._run.append(byte)
            return ""
        return self._emit(self._end_run() + token)

    def finish(self) -> str:
        return self._emit(self._end_run())

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _emit(self, text: str) -> str:
        while self._strip_left and text:
            if not text.startswith(self._strip):
                self._strip_left = 0
                break
            text = text[len(self._strip) :]
            self._strip_left -= 1
        return text


class _WindowJoiner:
    """Decodes [context | pending] and [context] with the library; what follows is new text.

    Exact for decoders in which a token's text depends only on its neighbour to the left.
    """

    def __init__(self, decode: Any, at_start: bool) -> None:
        self._decode = decode
        self._context: list[str] = [] if at_start else ["a"]
        self._pending: list[str] = []

    def push(self, token: str) -> str:
        self._pending.append(token)
        before, after = self._decode(self._context), self._decode(self._context + self._pending)
        if after.endswith(REPLACEMENT) or not after.startswith(before):
            return ""
        self._context, self._pending = (self._context + self._pending)[-1:], []
        return str(after[len(before) :])

    def finish(self) -> str:
        if not self._pending:
            return ""
        before, after = self._decode(self._context), self._decode(self._context + self._pending)
        self._pending = []
        return str(after[len(before) :])


class _Vocabulary:
    """Token strings by id, and which joiner the tokenizer's decoder calls for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = tokenizer.backend
        self._texts: dict[int, str | None] = {}
        self._special = {
            token.content for token in self._backend.get_added_tokens_decoder().values() if token.special
        }
        decoder = self._backend.decoder
        spec: dict[str, Any] | None = json.loads(decoder.__getstate__()) if decoder is not None else None
        self._byte_level = spec is not None and spec["type"] == "ByteLevel"
        self._byte_fallback = None if spec is None else _parse_byte_fallback(spec)

    def text_of(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """The token's string; None for an unknown id or a special token to skip."""
        if token_id not in self._texts:
            self._texts[token_id] = self._backend.id_to_token(token_id)
        token = self._texts[token_id]
        return None if skip_special_tokens and token in self._special else token

    def bytes_of(self, token_id: int) -> bytes:
        """What the token stands for by itself."""
        token = self.text_of(token_id, skip_special_tokens=False)
        if token is None:
            return b""
        if self._byte_level and token not in self._special:
            return _token_bytes(token)
        if self._byte_fallback is not None:
            byte = _fallback_byte(token)
            if byte is not None:
                return bytes((byte,))
            for old, new in self._byte_fallback[0]:
                token = token.replace(old, new)
        return token.encode("utf-8")

    def new_joiner(self, at_start: bool) -> _Joiner:
        if self._byte_level:
            return _ByteLevelJoiner()
        if self._byte_fallback is not None:
            replacements, strip, count = self._byte_fallback
            return _ByteFallbackJoiner(replacements, strip, count if at_start else 0)
        decoder = self._backend.decoder
        return _WindowJoiner(decoder.decode if decoder is not None else " ".join, at_start)


def _parse_byte_fallback(
    spec: dict[str, Any],
) -> tuple[tuple[tuple[str, str], ...], str, int] | None:
    """(replacements, stripped character, how often) of a sequence Replace* ByteFallback Fuse [Strip];
    None for any other decoder."""
    parts = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    kinds = [part["type"] for part in parts]
    if "ByteFallback" not in kinds:
        return None
    at = kinds.index("ByteFallback")
    tail = parts[at + 1 :]
    if any(kind != "Replace" for kind in kinds[:at]) or kinds[at + 1 : at + 2] != ["Fuse"]:
        return None
    if any("String" not in part["pattern"] for part in parts[:at]):
        return None
    replacements = tuple((part["pattern"]["String"], part["content"]) for part in parts[:at])
    if len(tail) == 1:
        return replacements, "", 0
    if len(tail) == 2 and tail[1]["type"] == "Strip" and not tail[1]["stop"]:
        return replacements, tail[1]["content"], tail[1]["start"]
    return None


def _fallback_byte(token: str) -> int | None:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for characters from U+0100."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(kept)]
    table = {chr(byte): byte for byte in kept}
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


@lru_cache(maxsize=65536)
def _token_bytes(token: str) -> bytes:
    """The bytes a byte-level token stands for; a token outside the alphabet (an added one) is plain."""
    table = _byte_of_char()
    try:
        return bytes(table[char] for char in token)
    except KeyError:
        return token.encode("utf-8")


_VOCABULARIES: WeakKeyDictionary[Tokenizer, _Vocabulary] = WeakKeyDictionary()


def _vocabulary(tokenizer: Tokenizer) -> _Vocabulary:
    if tokenizer not in _VOCABULARIES:
        _VOCABULARIES[tokenizer] = _Vocabulary(tokenizer)
    return _VOCABULARIES[tokenizer]
