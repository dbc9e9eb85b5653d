"""Logits processors: masks, bias and penalties of one sequence, applied to its row before sampling.

The order is that of ``SamplingParams``: allowed_token_ids and bad_words masks, min_tokens, logit_bias,
repetition penalty, frequency and presence penalties. All but ``allowed_token_ids`` touch only the
tokens concerned, so the cost does not grow with the vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pelton.runtime.sequence import Sequence

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]


class TokenCounts:
    """Distinct tokens of a sequence and how often each was generated; grows by one token at a time."""

    def __init__(self, prompt: Int32, capacity: int) -> None:
        distinct = np.unique(prompt)
        self._ids: Int32 = np.empty(len(distinct) + capacity, np.int32)
        self._ids[: len(distinct)] = distinct
        self._counts: Float32 = np.zeros(len(self._ids), np.float32)
        self._place = {token: i for i, token in enumerate(distinct.tolist())}

    def add(self, token: int) -> None:
        """Count one generated token."""
        i = self._place.setdefault(token, len(self._place))
        self._ids[i] = token
        self._counts[i] += 1

    @property
    def ids(self) -> Int32:
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> Float32:
        """Times generated (0: in the prompt only), in the order of ``ids``."""
        return self._counts[: len(self._place)]


class LogitsProcessor:
    """What one sequence's parameters do to its logits. Made once per request; ``add`` follows its
    answer."""

    def __init__(self, sequence: Sequence) -> None:
        params = sequence.request.sampling
        self._params = params
        allowed = params.allowed_token_ids
        self._allowed = None if allowed is None else np.array(allowed, np.int64)
        words = sequence.request.bad_word_ids
        self._bad_tokens = np.array(sorted({word[0] for word in words if len(word) == 1}), np.int64)
        self._bad_words = [word for word in words if len(word) > 1]
        ends = set(params.stop_token_ids)
        if not params.ignore_eos:
            ends.update(sequence.eos_token_ids)
        self._ends = np.array(sorted(ends) if params.min_tokens else [], np.int64)
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
        self._bias = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        self._counts: TokenCounts | None = None
        if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
            prompt = sequence.tokens[: sequence.num_prompt_tokens]
            self._counts = TokenCounts(prompt, sequence.max_tokens)
        self._static = (
            allowed is not None or bool(words) or bool(params.logit_bias) or self._counts is not None
        )

    def is_noop(self, sequence: Sequence) -> bool:
        """True when the next token's logits are left as they are."""
        return not self._static and not (
            len(self._ends) and sequence.num_output_tokens < self._params.min_tokens
        )

    def add(self, token: int) -> None:
        """``token`` was generated."""
        if self._counts is not None:
            self._counts.add(token)

    def apply(self, row_V: Float32, sequence: Sequence) -> None:
        """Change ``row_V``, the logits of ``sequence``'s next token, in place."""
        params = self._params
        if self._allowed is not None:
            kept = row_V[self._allowed]
            row_V.fill(-np.inf)
            row_V[self._allowed] = kept
        row_V[self._bad_tokens] = -np.inf
        if self._bad_words:
            self._mask_bad_words(row_V, sequence)
        if sequence.num_output_tokens < params.min_tokens:
            row_V[self._ends] = -np.inf
        if len(self._bias_ids):
            row_V[self._bias_ids] += self._bias
        if self._counts is not None:
            self._penalise(row_V, self._counts)

    def _mask_bad_words(self, row_V: Float32, sequence: Sequence) -> None:
        """Exclude the last token of each bad word whose other tokens the answer ends with."""
        longest = max(map(len, self._bad_words)) - 1
        begin = max(sequence.num_prompt_tokens, sequence.num_tokens - longest)
        tail = tuple(sequence.tokens[begin : sequence.num_tokens].tolist())
        for word in self._bad_words:
            if tail[-(len(word) - 1) :] == word[:-1]:
                row_V[word[-1]] = -np.inf

    def _penalise(self, row_V: Float32, seen: TokenCounts) -> None:
        params = self._params
        values = row_V[seen.ids]
        if params.repetition_penalty != 1.0:
            penalty = np.float32(params.repetition_penalty)
            values = np.where(values > 0, values / penalty, values * penalty)
        if params.frequency_penalty or params.presence_penalty:
            values -= np.float32(params.frequency_penalty) * seen.counts
            values -= np.float32(params.presence_penalty) * (seen.counts > 0)
        row_V[seen.ids] = values
