"""Sequence: a request's state inside the executor.

Its counters are numbers of a small array, its own or a part of the ``Seats``: single sequences are changed
here, hundreds at once there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pelton.runtime.kv_cache import SequenceKV
from pelton.runtime.prefix_cache import PrefixKeys
from pelton.runtime.request import FinishReason, Request, TokenLogprobs
from pelton.runtime.seats import (
    CAPACITY,
    MAX_TOTAL,
    MIN_TOTAL,
    NUM_COMPUTED,
    NUM_COUNTERS,
    NUM_PROMPT,
    NUM_SHARED,
    NUM_TOKENS,
    NUM_UNKNOWN,
)


class _Counter:
    """One of a sequence's counters as an attribute."""

    def __init__(self, row: int) -> None:
        self._row = row

    def __get__(self, sequence: Sequence, owner: type) -> int:
        return int(sequence.counters[self._row])

    def __set__(self, sequence: Sequence, value: int) -> None:
        sequence.counters[self._row] = value


class Sequence:
    """The tokens of one request and how far they are computed.

    ``num_computed`` tokens have their KV in the cache. While it is below ``num_tokens`` there is work;
    when a step brings it up to ``num_tokens``, that step's last row of logits gives the next token.
    """

    __slots__ = (
        "counters",
        "edited",
        "eos_token_ids",
        "keys",
        "kv",
        "max_tokens",
        "num_cached_tokens",
        "num_preemptions",
        "order",
        "processor",
        "prompt_logprobs",
        "prompt_logprobs_sent",
        "queue_time",
        "request",
        "request_id",
        "seat",
        "tokens",
    )

    num_tokens = _Counter(NUM_TOKENS)
    """Tokens it has, known or not."""
    num_unknown = _Counter(NUM_UNKNOWN)
    """Last tokens that are placeholders: steps in flight are still sampling them."""
    num_computed = _Counter(NUM_COMPUTED)
    num_prompt_tokens = _Counter(NUM_PROMPT)
    capacity = _Counter(CAPACITY)
    """Tokens that its blocks have room for."""
    num_shared_tokens = _Counter(NUM_SHARED)
    """Leading tokens whose KV was found in the prefix cache: it is never written again."""

    def __init__(
        self,
        request: Request,
        *,
        max_tokens: int,
        eos_token_ids: tuple[int, ...],
        arrival_index: int,
        kv: SequenceKV,
        keys: PrefixKeys | None,
    ) -> None:
        prompt = request.prompt_token_ids
        self.request = request
        self.request_id = request.request_id
        self.seat = -1
        """Its place in the ``Seats`` while it runs."""
        self.counters: npt.NDArray[np.int32] = np.zeros(NUM_COUNTERS, np.int32)
        self.max_tokens = max_tokens
        self.eos_token_ids = eos_token_ids
        self.order = (request.priority, request.arrival_time, arrival_index)
        """Priority, then arrival: smaller runs first. Unique, and kept through preemption."""
        self.tokens: npt.NDArray[np.int32] = np.empty(len(prompt) + max_tokens, np.int32)
        self.tokens[: len(prompt)] = prompt
        self.num_tokens = self.num_prompt_tokens = len(prompt)
        self.counters[MAX_TOTAL] = len(prompt) + max_tokens
        self.counters[MIN_TOTAL] = len(prompt) + request.sampling.min_tokens
        self.kv = kv
        self.keys = keys
        """None: this request neither reads the prefix cache nor adds to it."""
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache at the first admission."""
        self.num_preemptions = 0
        self.queue_time = -1.0
        """Seconds from arrival to the first step; negative before."""
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            [None] if request.sampling.prompt_logprobs is not None else None
        )
        self.prompt_logprobs_sent = False
        self.edited = False
        """Whether its logits are changed before a token is taken from them."""
        self.processor: object | None = None
        """Its ``runtime.logits.LogitsProcessor``, once made."""

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - len(self.request.prompt_token_ids)

    @property
    def prompt_rows_wanted(self) -> int:
        """Leading positions whose logits the prompt's log-probabilities need and do not have yet end
        here (0: none wanted). The row of position p scores the token at p + 1."""
        if self.prompt_logprobs is None or len(self.prompt_logprobs) == self.num_prompt_tokens:
            return 0
        return self.num_prompt_tokens - 1

    @property
    def num_known(self) -> int:
        """Leading tokens whose values are known."""
        return self.num_tokens - self.num_unknown

    @property
    def num_known_output_tokens(self) -> int:
        return self.num_known - len(self.request.prompt_token_ids)

    @property
    def complete(self) -> bool:
        """Whether it has all the tokens it may have, known or not."""
        return self.num_output_tokens >= self.max_tokens

    def finish_reason(self, token: int) -> tuple[FinishReason | None, int | None]:
        """Why ``token``, the last known one, ends the answer, and which stop token did; as in vLLM an
        end-of-sequence token is not named."""
        params = self.request.sampling
        if self.num_known_output_tokens >= params.min_tokens:
            if token in self.eos_token_ids and not params.ignore_eos:
                return "stop", None
            if token in params.stop_token_ids:
                return "stop", token
        if self.num_known_output_tokens >= self.max_tokens:
            return "length", None
        return None, None

    def append(self, token: int) -> None:
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1

    def expect(self, placeholder: int) -> None:
        """A token that a step in flight is sampling; below zero, as ``Session.submit`` takes it."""
        self.append(placeholder)
        self.num_unknown += 1

    def reveal(self, token: int) -> None:
        """The value of the first token that is still unknown."""
        self.tokens[self.num_known] = token
        self.num_unknown -= 1
