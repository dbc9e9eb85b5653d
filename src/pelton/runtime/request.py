"""What a request is, and what comes back: the types that cross between front ends and executor.

They are msgspec structs, so that the same values travel in process or over a socket.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen and when generation ends. Validated by ``runtime.validation``.

    Order of application, as in vLLM: allowed_token_ids and bad_words masks, min_tokens,
    logit_bias, repetition then frequency and presence penalties, temperature, top_k, top_p, min_p.
    """

    n: int = 1
    """Answers per prompt; answer i uses a seed derived from (seed, i)."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0: all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output tokens (Keskar et al., 2019)."""
    presence_penalty: float = 0.0
    """Over output tokens only, as frequency_penalty."""
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    """None: as many as fit in the engine's max_seq_len."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    """Texts that end the answer; never part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the answer; the id is part of ``token_ids``, its text not of ``text``."""
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    """Alternatives to report per generated token (0: the chosen one only). Log-probabilities are of
    the model's own logits, before masks, penalties and temperature."""
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One answer to compute: ``n`` > 1 has been split, text has become tokens, limits are checked."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int = 0
    """The resolved seed of this answer; its random numbers are keyed by (seed, position)."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    """Lower runs first."""
    arrival_time: float = 0.0
    """``time.monotonic()`` where the request entered."""
    cache_salt: str = ""
    """Separates prefix-cache users from one another."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one position: the chosen token first, then the most likely ones."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int
    """1-based rank of the chosen token."""


class RequestUpdate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What one step added to a request."""

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per new token, when asked for."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Once, with the first update, when asked for; None at position 0."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; None for an end-of-sequence token."""
    error: str | None = None
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache (first update)."""
    queue_time: float = 0.0
    """Seconds waited before the first step (first update)."""


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One answer as a front end reports it. Each update makes a new one; ``text``, ``token_ids`` and
    ``logprobs`` hold everything so far (the lists are shared and grow), the ``new_`` fields and ``delta``
    what the update added. ``delta`` may lag behind the tokens: characters and possible stop strings are
    held back until they are certain."""

    index: int
    text: str = ""
    delta: str = ""
    token_ids: list[int] = []
    new_token_ids: tuple[int, ...] = ()
    logprobs: list[TokenLogprobs] | None = None
    new_logprobs: tuple[TokenLogprobs, ...] = ()
    cumulative_logprob: float | None = None
    """Sum over the answer's tokens, where ``logprobs`` were asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    """One sentence, with finish_reason "error"."""


class RequestOutput(msgspec.Struct, kw_only=True):
    """All answers to one prompt, as of one update."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0
    queue_time: float = 0.0
    """Seconds before the first answer's first step."""
