"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pelton.runtime.detokenizer import token_bytes
from pelton.runtime.request import TokenLogprobs
from pelton.runtime.tokenizer import Tokenizer

#: JSON has no infinities; this is what OpenAI's own servers clip to.
_FLOOR = -9999.0


def _finite(value: float) -> float:
    return max(value, _FLOOR)


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    raw = token_bytes(tokenizer, token)
    return {
        "token": raw.decode("utf-8", "replace"),
        "logprob": _finite(logprob),
        "bytes": list(raw),
    }


def chat_logprobs(tokenizer: Tokenizer, positions: Sequence[TokenLogprobs], top: int) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat completion."""
    content = []
    for position in positions:
        entry = _entry(tokenizer, position.token_ids[0], position.logprobs[0])
        entry["top_logprobs"] = [
            _entry(tokenizer, token, logprob) for token, logprob in _alternatives(position, top)
        ]
        content.append(entry)
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer,
    positions: Sequence[TokenLogprobs | None],
    first_token: int | None,
    top: int,
    offset: int,
) -> dict[str, Any]:
    """``choices[].logprobs`` of a completion; ``offset`` is where its text begins.

    A position of None is the first prompt token ``first_token``, which nothing precedes (echo)."""
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for position in positions:
        token = first_token if position is None else position.token_ids[0]
        assert token is not None
        text = token_bytes(tokenizer, token).decode("utf-8", "replace")
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        if position is None:
            values.append(None)
            tops.append(None)
            continue
        values.append(_finite(position.logprobs[0]))
        best: dict[str, float] = {}
        for alternative, logprob in _alternatives(position, top):
            name = token_bytes(tokenizer, alternative).decode("utf-8", "replace")
            best.setdefault(name, _finite(logprob))
        best.setdefault(text, _finite(position.logprobs[0]))
        tops.append(best)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _alternatives(position: TokenLogprobs, top: int) -> list[tuple[int, float]]:
    """The ``top`` likeliest tokens. The chosen one leads in ``position`` whatever its rank."""
    return list(zip(position.token_ids[1:], position.logprobs[1:], strict=True))[:top]
