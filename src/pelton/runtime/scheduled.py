"""What the scheduler decides: one step, as objects for those who look at single sequences and as arrays
for those who handle all at once."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pelton.runtime.seats import Everyone
from pelton.runtime.sequence import Sequence

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """``num_new`` tokens of ``sequence`` from ``num_computed`` on, and rows of logits wanted of them."""

    sequence: Sequence
    num_computed: int
    num_new: int
    first_prompt_row: int
    """Positions ``first_prompt_row`` .. ``last_prompt_row`` - 1 are scored for prompt log-probabilities."""
    last_prompt_row: int
    samples: bool
    """The chunk reaches the sequence's end: its last row gives the next token."""

    @property
    def num_rows(self) -> int:
        return self.last_prompt_row - self.first_prompt_row + self.samples


@dataclass(frozen=True, slots=True)
class StepArrays:
    """A step's sequences with their seats: B of them, in the order of its batch."""

    sequences: Seq[Sequence]
    seats_B: Int32
    starts_B: Int32
    """Tokens computed before."""
    counts_B: Int32
    """Tokens of this step."""
    samples_B: npt.NDArray[np.bool_]
    prompt_rows: Seq[tuple[int, int]] | None = None
    """First and last scored position of each sequence's prompt; None: there are none."""
    everyone: Everyone | None = None
    """Where all who sit decode one token each: these, in the order of seats."""

    @classmethod
    def of(cls, scheduled: Seq[ScheduledSequence]) -> StepArrays:
        """In the order given."""
        n = len(scheduled)
        scores = any(s.last_prompt_row > s.first_prompt_row for s in scheduled)
        return cls(
            sequences=[s.sequence for s in scheduled],
            seats_B=np.fromiter((s.sequence.seat for s in scheduled), np.int32, n),
            starts_B=np.fromiter((s.num_computed for s in scheduled), np.int32, n),
            counts_B=np.fromiter((s.num_new for s in scheduled), np.int32, n),
            samples_B=np.fromiter((s.samples for s in scheduled), bool, n),
            prompt_rows=[(s.first_prompt_row, s.last_prompt_row) for s in scheduled] if scores else None,
        )

    def seats_that_sample(self) -> Int32:
        """Of those who get a token, in this order."""
        return self.seats_B if self.samples_B.all() else self.seats_B[self.samples_B]

    def who_samples(self) -> Seq[Sequence]:
        """Those who get a token, in this order."""
        if self.everyone is not None or self.samples_B.all():
            return self.sequences
        return [self.sequences[b] for b in np.flatnonzero(self.samples_B).tolist()]

    def by_seat(self) -> StepArrays:
        """In the order of seats: the order in which block tables lie."""
        assert self.prompt_rows is None
        if self.everyone is not None or (self.seats_B[1:] > self.seats_B[:-1]).all():
            return self
        order = np.argsort(self.seats_B)
        return StepArrays(
            sequences=[self.sequences[i] for i in order.tolist()],
            seats_B=self.seats_B[order],
            starts_B=self.starts_B[order],
            counts_B=self.counts_B[order],
            samples_B=self.samples_B[order],
        )


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: the leading sequences of the order, which decode one token each, then chunks."""

    decoding: Seq[Sequence]
    decoding_seats: Int32
    decoding_starts: Int32
    chunks: tuple[ScheduledSequence, ...]
    num_tokens: int
    preempted: tuple[str, ...]
    """Ids of requests that lost their blocks."""
    everyone: Everyone | None = None
    """Where those who decode are all who sit, in the order of seats."""

    @property
    def scheduled(self) -> tuple[ScheduledSequence, ...]:
        """All of it, one by one."""
        starts = self.decoding_starts.tolist()
        decodes = (
            ScheduledSequence(sequence, start, 1, 0, 0, True)
            for sequence, start in zip(self.decoding, starts, strict=True)
        )
        return (*decodes, *self.chunks)

    def arrays(self) -> StepArrays:
        """All of it at once."""
        n, everyone = len(self.decoding), self.everyone
        ones, every = (
            (np.ones(n, np.int32), np.ones(n, bool))
            if everyone is None
            else (everyone.ones_B, everyone.all_B)
        )
        seats, starts = self.decoding_seats, self.decoding_starts
        if not self.chunks:
            return StepArrays(self.decoding, seats, starts, ones, every, everyone=everyone)
        decodes = StepArrays(self.decoding, seats, starts, ones, every)
        rest = StepArrays.of(self.chunks)
        prompt_rows = None if rest.prompt_rows is None else [(0, 0)] * n + list(rest.prompt_rows)
        return StepArrays(
            sequences=[*self.decoding, *rest.sequences],
            seats_B=np.concatenate([decodes.seats_B, rest.seats_B]),
            starts_B=np.concatenate([decodes.starts_B, rest.starts_B]),
            counts_B=np.concatenate([decodes.counts_B, rest.counts_B]),
            samples_B=np.concatenate([decodes.samples_B, rest.samples_B]),
            prompt_rows=prompt_rows,
        )
