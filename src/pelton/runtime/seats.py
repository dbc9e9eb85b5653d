"""Seats: the state of all running sequences as arrays, so that a step of hundreds of them is a few vector
operations. Hot.

A waiting sequence keeps its counters and tokens itself. When it is admitted it takes a seat: from then on
its ``counters`` and ``tokens`` are views of these arrays, and so is each group's block table. There is one
truth, and either side may change it. The lowest free seat is given first: under load seats have no holes, and
a step in the order of seats finds its block tables as they lie here.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from pelton.runtime.sequence import Sequence

Int32 = npt.NDArray[np.int32]

#: Rows of ``counters``; ``Sequence`` says what each is.
NUM_TOKENS, NUM_UNKNOWN, NUM_COMPUTED, NUM_PROMPT, MAX_TOTAL, MIN_TOTAL, CAPACITY, NUM_SHARED = range(8)
NUM_COUNTERS = 8
#: Those that grow by one with each step that decodes.
STEPPING = slice(NUM_TOKENS, NUM_COMPUTED + 1)


class Everyone:
    """All sequences that sit, by seat, and what stays as long as they do."""

    def __init__(self, seats: Seats, sequences: list[Sequence], seats_B: Int32) -> None:
        n = len(sequences)
        self.sequences, self.seats_B = sequences, seats_B
        self.request_ids = [sequence.request_id for sequence in sequences]
        dense = n > 0 and int(seats_B[-1]) == n - 1
        self.at: slice | Int32 = slice(0, n) if dense else seats_B
        """Indexes the seats' arrays: a slice, which copies nothing, where there are no holes."""
        self.generation_B = seats.generation_S[seats_B]
        self.seed_B, self.draws = seats.seed_S[seats_B], bool(seats.temperature_S[seats_B].any())
        self.random: list[npt.NDArray[np.float32]] = []
        """Random numbers of its next steps, the last first, as far as they are made."""
        self.ends_B, self.stops_B = seats.ends_S[seats_B], seats.stops_S[seats_B]
        self.ends, self.stops = bool(self.ends_B.any()), bool(self.stops_B.any())
        self.last_B: Int32 = seats.counters_CS[MAX_TOTAL, seats_B] - np.int32(1)
        """Index of the last token it may have."""
        self.firsts_B = seats_B.astype(np.intp) * seats.tokens_SL.shape[1]
        """Where its tokens begin in ``tokens_F``."""
        self.ones_B, self.all_B = np.ones(n, np.int32), np.ones(n, bool)
        for array in (self.ones_B, self.all_B):
            array.flags.writeable = False


class Seats:
    """``num_seats`` of them, for sequences of at most ``max_seq_len`` tokens. S seats, M columns."""

    def __init__(self, num_seats: int, *, num_groups: int, num_columns: int, max_seq_len: int) -> None:
        self.counters_CS: Int32 = np.zeros((NUM_COUNTERS, num_seats), np.int32)
        self.tokens_SL: Int32 = np.zeros((num_seats, max_seq_len), np.int32)
        """Untouched memory costs nothing: what is taken is what sequences use."""
        self.tokens_F = self.tokens_SL.reshape(-1)
        """The same, flat."""
        self.tables_GSM: Int32 = np.zeros((num_groups, num_seats, num_columns), np.int32)
        self.generation_S: Int32 = np.zeros(num_seats, np.int32)
        """How often a seat has been left: while it stays, the sequence sits and has its blocks."""
        self.temperature_S = np.zeros(num_seats, np.float32)
        self.top_k_S: Int32 = np.zeros(num_seats, np.int32)
        self.top_p_S = np.ones(num_seats, np.float32)
        self.min_p_S = np.zeros(num_seats, np.float32)
        self.seed_S = np.zeros(num_seats, np.uint64)
        self.stops_S = np.zeros(num_seats, bool)
        """Whether the sequence has stop token ids."""
        self.ends_S = np.zeros(num_seats, bool)
        """Whether an end-of-sequence token ends it."""
        self.plain_S = np.zeros(num_seats, bool)
        """Whether it wants no rows of logits but its last."""
        self.edited_S = np.zeros(num_seats, bool)
        """Whether masks, bias or penalties change its logits, and the parameters of those that count."""
        self.masked_S: Int32 = np.zeros(num_seats, np.int32)
        self.repetition_S = np.ones(num_seats, np.float32)
        self.frequency_S = np.zeros(num_seats, np.float32)
        self.presence_S = np.zeros(num_seats, np.float32)
        self.logprobs_S: Int32 = np.full(num_seats, -1, np.int32)
        """Alternatives wanted with log-probabilities; -1: none wanted."""
        self.begun_S = np.zeros(num_seats, bool)
        """Whether a session that samples by itself has the sequence's edits."""
        self._free = list(range(num_seats))
        self._sitting: dict[int, Sequence] = {}
        self._everyone: Everyone | None = None
        self._aside: set[int] = set()
        """Seats of those who have all their tokens, and leave when these are known."""

    @property
    def everyone(self) -> Everyone:
        """Who sits and is not set aside, by seat; the same object until one comes, or one of them leaves."""
        if self._everyone is None:
            seats = sorted(self._sitting.keys() - self._aside)
            self._everyone = Everyone(self, [self._sitting[s] for s in seats], np.array(seats, np.int32))
        return self._everyone

    def set_aside(self, rows: npt.NDArray[np.bool_]) -> Everyone:
        """``everyone`` from now on: without these, who have all their tokens, known or not."""
        before, kept = self.everyone, (~rows).nonzero()[0]
        self._aside.update(before.seats_B[rows].tolist())
        sequences = [before.sequences[i] for i in kept.tolist()]
        self._everyone = Everyone(self, sequences, before.seats_B[kept])
        return self._everyone

    def still(self, everyone: Everyone) -> bool:
        """Whether none of them has left."""
        if self._everyone is everyone:
            return True
        return bool((self.generation_S[everyone.at] == everyone.generation_B).all())

    def take(self, sequence: Sequence) -> None:
        """Seat a sequence that holds no blocks."""
        seat = heapq.heappop(self._free)
        sequence.seat = seat
        self._sitting[seat], self._everyone = sequence, None
        counters, tokens = sequence.counters, sequence.tokens
        sequence.counters = self.counters_CS[:, seat]
        sequence.counters[:] = counters
        sequence.tokens = self.tokens_SL[seat, : len(tokens)]
        sequence.tokens[: sequence.num_tokens] = tokens[: sequence.num_tokens]
        for g, table in enumerate(sequence.kv.tables):
            table.blocks = self.tables_GSM[g, seat]
        params = sequence.request.sampling
        self.temperature_S[seat] = params.temperature
        self.top_k_S[seat] = params.top_k
        self.top_p_S[seat] = params.top_p
        self.min_p_S[seat] = params.min_p
        self.seed_S[seat] = (sequence.request.seed or 0) & (1 << 64) - 1
        self.stops_S[seat] = bool(params.stop_token_ids)
        self.ends_S[seat] = not params.ignore_eos
        self.plain_S[seat] = params.prompt_logprobs is None
        self.edited_S[seat] = sequence.edited
        self.masked_S[seat] = params.allowed_token_ids is not None
        self.repetition_S[seat] = params.repetition_penalty
        self.frequency_S[seat] = params.frequency_penalty
        self.presence_S[seat] = params.presence_penalty
        self.logprobs_S[seat] = -1 if params.logprobs is None else params.logprobs
        self.begun_S[seat] = False

    def leave(self, sequence: Sequence) -> None:
        """Give the seat of a sequence back, whose blocks are free already."""
        seat = sequence.seat
        assert seat >= 0
        sequence.counters = sequence.counters.copy()
        sequence.tokens = sequence.tokens.copy()
        for table in sequence.kv.tables:
            assert table.stop == 0
            table.blocks = table.blocks[:0]
        self.generation_S[seat] += 1
        del self._sitting[seat]
        if seat in self._aside:
            self._aside.remove(seat)
        else:
            self._everyone = None
        heapq.heappush(self._free, seat)
        sequence.seat = -1
