"""Logits processors: masks, bias and penalties of one sequence, applied to its row before sampling.

The order is that of ``SamplingParams``: allowed_token_ids and bad_words masks, min_tokens, logit_bias,
repetition penalty, frequency and presence penalties. All but ``allowed_token_ids`` touch only the
tokens concerned, so the cost does not grow with the vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pelton.engine.batch_sampling import SequenceEdits
from pelton.kernels.sampling.cuda import IN_PROMPT, LIST_ROOM
from pelton.runtime.sequence import Sequence

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]


class TokenCounts:
    """Distinct tokens of a sequence and how often each was generated; follows it when asked to."""

    def __init__(self, prompt: Int32, capacity: int) -> None:
        distinct = np.unique(prompt)
        self._num_seen, self._num_in_prompt = len(prompt), len(distinct)
        self._ids: Int32 = np.empty(len(distinct) + capacity, np.int32)
        self._ids[: len(distinct)] = distinct
        self._counts: Float32 = np.zeros(len(self._ids), np.float32)
        self._place = {token: i for i, token in enumerate(distinct.tolist())}

    def follow(self, sequence: Sequence) -> None:
        """Count what has been generated since, as far as it is known."""
        known = sequence.num_known
        for token in sequence.tokens[self._num_seen : known].tolist():
            i = self._place.setdefault(token, len(self._place))
            self._ids[i] = token
            self._counts[i] += 1
        self._num_seen = known

    @property
    def ids(self) -> Int32:
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> Float32:
        """Times generated (0: in the prompt only), in the order of ``ids``."""
        return self._counts[: len(self._place)]

    @property
    def numbers(self) -> Int32:
        """As ``SequenceEdits.counts``, in the order of ``ids``."""
        numbers = np.minimum(self.counts, IN_PROMPT - 1).astype(np.int32)
        numbers[: self._num_in_prompt] += IN_PROMPT
        return numbers


class LogitsProcessor:
    """What one sequence's parameters do to its logits. Made once per request; what it counts, it counts when
    it is used."""

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

    @property
    def edits(self) -> bool:
        """Whether it ever changes logits."""
        return self._static or len(self._ends) > 0

    @property
    def on_device(self) -> bool:
        """Whether a session that samples by itself can do it: lists are short, bad words single tokens."""
        entries = len(self._bad_tokens) + len(self._bias_ids) + len(self._ends)
        return not self._bad_words and entries <= LIST_ROOM

    def device_edits(self, sequence: Sequence) -> SequenceEdits:
        """The sequence's state before its next token; at most one of its tokens is not known yet."""
        none = np.zeros(0, np.int32)
        token_ids, counts, unknown = none, none, 0
        if self._counts is not None:
            self._counts.follow(sequence)
            token_ids, counts = self._counts.ids, self._counts.numbers
            assert sequence.num_unknown <= 1
            if sequence.num_unknown:
                unknown = int(sequence.tokens[sequence.num_known])
        values = dict(zip(self._bias_ids.tolist(), self._bias.tolist(), strict=True))
        values.update(dict.fromkeys(self._bad_tokens.tolist(), -np.inf))
        return SequenceEdits(
            seat=sequence.seat,
            token_ids=token_ids,
            counts=counts,
            unknown=unknown,
            bias_ids=np.fromiter(values.keys(), np.int32, len(values)),
            bias=np.fromiter(values.values(), np.float32, len(values)),
            end_ids=self._ends.astype(np.int32),
            allowed_ids=None if self._allowed is None else self._allowed.astype(np.int32),
        )

    def is_noop(self, sequence: Sequence) -> bool:
        """True when the next token's logits are left as they are."""
        return not self._static and not (
            len(self._ends) and sequence.num_output_tokens < self._params.min_tokens
        )

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
            self._counts.follow(sequence)
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
