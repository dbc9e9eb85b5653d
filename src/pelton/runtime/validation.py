"""From what a user asked to ``Request``s: every field checked here, so that nothing beyond fails on it.

Each refusal is a ``RequestError`` that names the field, its value and what is allowed; ``param`` is the
field's name.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from pelton.engine.config import EngineConfig
from pelton.errors import RequestError
from pelton.runtime.request import Request, SamplingParams

MAX_ANSWERS = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
"""Characters of one stop string: a stream may be held back by as many."""
MAX_BIASES = 1024
MAX_BAD_WORDS = 1024


class BadWordTokenizer(Protocol):
    """All that validation needs of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...


def derive_seed(seed: int, index: int) -> int:
    """The seed of answer ``index``: the first 8 bytes of blake2b(seed, index), both as 8-byte
    little-endian integers, less the top bit. Answer 0 of n=4 equals the only answer of n=1."""
    data = (seed & (2**64 - 1)).to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") & (2**63 - 1)


def answer_id(request_id: str, index: int, n: int) -> str:
    """The executor's id of one of ``n`` answers."""
    return request_id if n == 1 else f"{request_id}.{index}"


def resolve_requests(
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    engine_config: EngineConfig,
    tokenizer: BadWordTokenizer | None,
    request_id: str,
    priority: int = 0,
    *,
    arrival_time: float | None = None,
    cache_salt: str = "",
    max_request_tokens: int | None = None,
) -> list[Request]:
    """The ``n`` requests that answer one prompt, checked and with every default resolved.

    ``max_request_tokens`` bounds prompt plus answer (``Executor.max_request_tokens``; default: the
    engine's ``max_seq_len``). ``tokenizer`` is needed for ``bad_words`` alone. Raises ``RequestError``.
    """
    build, vocab_size = engine_config.build, engine_config.model.vocab_size
    assert build.max_seq_len and build.max_input_len
    limit = min(build.max_seq_len, max_request_tokens or build.max_seq_len)
    _check_prompt(prompt_ids, vocab_size, build.max_input_len, limit)
    _check_numbers(sampling)
    _check_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    _check_stop(sampling.stop)
    _check_bias(sampling.logit_bias, vocab_size)
    if sampling.allowed_token_ids is not None:
        _check_ids("allowed_token_ids", sampling.allowed_token_ids, vocab_size)
        if not sampling.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids is empty; leave it out to allow all", param="allowed_token_ids"
            )
    for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
        if not isinstance(getattr(sampling, name), bool):
            raise _refusal(name, getattr(sampling, name), "true or false")
    max_tokens = _resolve_max_tokens(sampling, len(prompt_ids), limit)
    bad_word_ids = _tokenise_bad_words(sampling.bad_words, tokenizer, vocab_size)
    if not isinstance(priority, int) or isinstance(priority, bool) or not -(2**31) <= priority < 2**31:
        raise _refusal("priority", priority, "a whole number that fits 32 bits")
    resolved = msgspec.structs.replace(
        sampling,
        n=1,
        max_tokens=max_tokens,
        top_k=max(0, sampling.top_k),
        stop=tuple(sampling.stop),
        logit_bias={int(token): float(bias) for token, bias in sampling.logit_bias.items()},
    )
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    arrival = time.monotonic() if arrival_time is None else arrival_time
    prompt = tuple(prompt_ids)
    return [
        Request(
            request_id=answer_id(request_id, i, sampling.n),
            prompt_token_ids=prompt,
            sampling=resolved,
            seed=derive_seed(seed, i),
            bad_word_ids=bad_word_ids,
            priority=priority,
            arrival_time=arrival,
            cache_salt=cache_salt,
        )
        for i in range(sampling.n)
    ]


def _refusal(name: str, value: object, allowed: str) -> RequestError:
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return RequestError(f"{name} is {shown}; it must be {allowed}", param=name)


def _check_prompt(prompt_ids: Sequence[int], vocab_size: int, max_input_len: int, limit: int) -> None:
    if not len(prompt_ids):
        raise RequestError("the prompt is empty; give at least one token", param="prompt")
    longest = min(max_input_len, limit - 1)
    if len(prompt_ids) > longest:
        raise RequestError(
            f"the prompt has {len(prompt_ids)} tokens; this engine takes prompts of at most {longest}",
            param="prompt",
            code="context_length_exceeded",
        )
    for token in prompt_ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise RequestError(
                f"prompt token id {token!r} is outside the vocabulary, 0 to {vocab_size - 1}", param="prompt"
            )


def _check_numbers(p: SamplingParams) -> None:
    _check_int("n", p.n, 1, MAX_ANSWERS)
    _check_float("temperature", p.temperature, 0, 100)
    _check_int("top_k", p.top_k, -1, 2**31 - 1, "0 or -1 (all), or a number of tokens")
    _check_float("top_p", p.top_p, 0, 1, above=True)
    _check_float("min_p", p.min_p, 0, 1)
    _check_float("repetition_penalty", p.repetition_penalty, 0, 10, above=True)
    _check_float("presence_penalty", p.presence_penalty, -2, 2)
    _check_float("frequency_penalty", p.frequency_penalty, -2, 2)
    if p.seed is not None:
        _check_int("seed", p.seed, -(2**63), 2**64 - 1, "a whole number that fits 64 bits")
    for name, value in (("logprobs", p.logprobs), ("prompt_logprobs", p.prompt_logprobs)):
        if value is not None:
            _check_int(name, value, 0, MAX_LOGPROBS)


def _check_int(name: str, value: object, low: int, high: int, allowed: str | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _refusal(name, value, allowed or f"a whole number from {low} to {high}")


def _check_float(name: str, value: object, low: float, high: float, above: bool = False) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not low <= value <= high or (above and value == low):  # type: ignore[operator]
        raise _refusal(name, value, f"a number {'above' if above else 'from'} {low} {'up ' * above}to {high}")


def _check_ids(name: str, ids: Any, vocab_size: int) -> None:
    if not isinstance(ids, tuple | list):
        raise _refusal(name, ids, "a list of token ids")
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise RequestError(f"{name} contains {token!r}; token ids are 0 to {vocab_size - 1}", param=name)


def _check_stop(stop: Any) -> None:
    if not isinstance(stop, tuple | list):
        raise _refusal("stop", stop, "a list of strings")
    if len(stop) > MAX_STOP_STRINGS:
        raise RequestError(
            f"stop has {len(stop)} strings; at most {MAX_STOP_STRINGS} are allowed", param="stop"
        )
    for text in stop:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH:
            raise RequestError(
                f"stop contains {_refused(text)}; each must be a string of 1 to {MAX_STOP_LENGTH} characters",
                param="stop",
            )


def _refused(text: object) -> str:
    return f"a string of {len(text)} characters" if isinstance(text, str) else repr(text)[:80]


def _check_bias(logit_bias: Any, vocab_size: int) -> None:
    if not isinstance(logit_bias, dict):
        raise _refusal("logit_bias", logit_bias, "a mapping from token ids to numbers")
    if len(logit_bias) > MAX_BIASES:
        raise RequestError(
            f"logit_bias has {len(logit_bias)} entries; at most {MAX_BIASES} are allowed", param="logit_bias"
        )
    _check_ids("logit_bias", list(logit_bias), vocab_size)
    for token, bias in logit_bias.items():
        good = isinstance(bias, int | float) and not isinstance(bias, bool) and -100 <= bias <= 100
        if not good:
            raise RequestError(
                f"logit_bias of token {token} is {bias!r}; it must be a number from -100 to 100",
                param="logit_bias",
            )


def _resolve_max_tokens(p: SamplingParams, num_prompt: int, limit: int) -> int:
    room = limit - num_prompt
    max_tokens = room if p.max_tokens is None else p.max_tokens
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise _refusal("max_tokens", max_tokens, "a whole number of at least 1")
    if max_tokens > room:
        raise RequestError(
            f"max_tokens is {max_tokens}, but after a prompt of {num_prompt} tokens {room} fit into this "
            f"engine's {limit}; lower max_tokens or shorten the prompt",
            param="max_tokens",
            code="context_length_exceeded",
        )
    _check_int(
        "min_tokens", p.min_tokens, 0, max_tokens, f"a whole number from 0 to max_tokens, {max_tokens}"
    )
    return max_tokens


def _tokenise_bad_words(
    bad_words: Any, tokenizer: BadWordTokenizer | None, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Token sequences of each word, as it stands at a text's start and after a space."""
    if not isinstance(bad_words, tuple | list):
        raise _refusal("bad_words", bad_words, "a list of strings")
    if len(bad_words) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words has {len(bad_words)} strings; at most {MAX_BAD_WORDS} are allowed", param="bad_words"
        )
    found: dict[tuple[int, ...], None] = {}
    for word in bad_words:
        if not isinstance(word, str) or not word.strip():
            raise RequestError(
                f"bad_words contains {word!r}; each must be a non-empty string", param="bad_words"
            )
        if tokenizer is None:
            raise RequestError("bad_words needs a tokenizer, and this engine has none", param="bad_words")
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if ids and all(token < vocab_size for token in ids):
                found[ids] = None
    return tuple(found)
