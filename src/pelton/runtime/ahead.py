"""Running one step ahead of the host, on a session that samples by itself (``Session.submit``).

While step N runs, step N+1 is scheduled and submitted: a sequence's token that N is still sampling stands
in N+1's ids as a placeholder, which the device replaces. So the device never waits for the host. What the
host learns late costs at most one step: a sequence that ends with N's token has been computed once more, and
that result is dropped; its blocks may be given away at once, since the device works in order.

Hot: what every step does to every sequence is done to all seats together; single sequences are only touched
where something happens to them (a block is full, an answer begins or ends).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pelton.engine.batch_sampling import PendingStep, SamplingInputs
from pelton.runtime.host_time import HostClock
from pelton.runtime.input_batch import InputBatchBuilder
from pelton.runtime.request import TokenLogprobs
from pelton.runtime.sampler import logits_processor
from pelton.runtime.sampling_inputs import next_inputs, sampling_inputs
from pelton.runtime.scheduled import SchedulerOutput, StepArrays
from pelton.runtime.seats import (
    MAX_TOTAL,
    MIN_TOTAL,
    NUM_COMPUTED,
    NUM_PROMPT,
    NUM_TOKENS,
    NUM_UNKNOWN,
    STEPPING,
    Everyone,
    Seats,
)
from pelton.runtime.sequence import Sequence

Int32 = npt.NDArray[np.int32]


def needs_host(sequence: Sequence) -> bool:
    """Whether its logits must come to the host: the prompt's are scored, or the device cannot edit them."""
    return sequence.request.sampling.prompt_logprobs is not None or not logits_processor(sequence).on_device


@dataclass(frozen=True)
class InFlight:
    """A submitted step."""

    step: StepArrays
    generation_B: Int32
    """That of each seat when the step was submitted."""
    inputs: SamplingInputs
    pending: PendingStep
    known_N: Int32 | None = None
    """Tokens of each sequence before the one it samples, where the step is everyone's."""
    began: bool = True
    """Whether it may sample a sequence's first token."""


@dataclass(frozen=True)
class Sampled:
    """What a step in flight has given, its sequences' counters brought up to date."""

    sequences: Seq[Sequence]
    """Those that sampled."""
    tokens_N: Int32
    """Their tokens; below zero: why there is none (``engine.batch_sampling``)."""
    special_N: npt.NDArray[np.bool_]
    """Who has perhaps ended, got its first token, or sits no more: the caller looks at each. Of who sits no
    more, the token is not yet part of the sequence."""
    sits_N: npt.NDArray[np.bool_]
    logprobs_N: list[TokenLogprobs | None] | None
    """Those of each row that wants any; None: no row does."""


class Ahead:
    """At most one step in flight on ``session``."""

    def __init__(
        self,
        session: Any,
        seats: Seats,
        batches: InputBatchBuilder,
        *,
        block_size: int,
        windows: bool,
        caches: bool,
        eos_token_ids: tuple[int, ...],
        clock: HostClock,
    ) -> None:
        self._session, self._seats, self._batches = session, seats, batches
        self._block_size, self._windows, self.clock = block_size, windows, clock
        self._caches = caches
        self._placeholders = np.arange(-1, -1 - len(seats.generation_S), -1, dtype=np.int32)
        self._eos = eos_token_ids
        self.in_flight: InFlight | None = None

    @property
    def available(self) -> bool:
        """Whether the session samples by itself."""
        return bool(getattr(self._session, "samples", False))

    def take(self) -> InFlight | None:
        """The step in flight, which is now the caller's."""
        flight, self.in_flight = self.in_flight, None
        return flight

    def submit(self, output: SchedulerOutput, before: InFlight | None = None) -> None:
        """Start a step; its members' state is as it will be when the step is over. ``before``: the one that
        runs."""
        step, seats = output.arrays().by_seat(), self._seats
        counters, everyone = seats.counters_CS, step.everyone
        if everyone is not None and before is not None and before.step.everyone is everyone:
            batch, goes_on = self._batches.build_next(step), True
            inputs = next_inputs(before.inputs, everyone, seats, batch.groups[0].seq_lens_B)
        else:
            batch, goes_on = self._batches.build(step), False
            inputs = sampling_inputs(step, seats)
        pending = self._session.submit(batch, inputs)
        if everyone is not None:
            known_N = batch.groups[0].seq_lens_B
            seats.tokens_F[everyone.firsts_B + known_N] = self._placeholders[: len(known_N)]
            counters[STEPPING, everyone.at] += 1
            if not goes_on:
                everyone.random.clear()
            self.in_flight = InFlight(step, everyone.generation_B, inputs, pending, known_N, not goes_on)
            return
        seats_N = step.seats_that_sample()
        num_tokens_N = counters[NUM_TOKENS, seats_N]
        seats.tokens_SL[seats_N, num_tokens_N] = self._placeholders[: len(seats_N)]
        counters[NUM_TOKENS, seats_N] = num_tokens_N + 1
        counters[NUM_UNKNOWN, seats_N] += 1
        counters[NUM_COMPUTED, step.seats_B] = step.starts_B + step.counts_B
        self.in_flight = InFlight(step, seats.generation_S[step.seats_B], inputs, pending)

    def filled(self, flight: InFlight) -> list[tuple[Sequence, int]]:
        """Whose blocks a step has filled, or moved a window past, with its tokens computed; of those that
        still have them."""
        step, size = flight.step, self._block_size
        if not self._windows and not self._caches:
            return []
        ends_B = step.starts_B + step.counts_B
        sits_B = self._seats.generation_S[step.seats_B] == flight.generation_B
        if not self._windows:
            sits_B &= ends_B // size > step.starts_B // size
        return [(step.sequences[b], int(ends_B[b])) for b in np.flatnonzero(sits_B).tolist()]

    def collect(self, flight: InFlight) -> Sampled:
        """Wait for a step and take its tokens in."""
        step, seats = flight.step, self._seats
        with self.clock.waiting():
            tokens_N = flight.pending.tokens()
        everyone = step.everyone
        if everyone is not None and seats.still(everyone):
            special_N = self._reveal_all(everyone, flight, tokens_N)
            sits_N = everyone.all_B
        else:
            seats_N, generation_N = step.seats_B, flight.generation_B
            if not step.samples_B.all():
                seats_N, generation_N = seats_N[step.samples_B], generation_N[step.samples_B]
            sits_N = seats.generation_S[seats_N] == generation_N
            here = seats_N[sits_N]
            special_N = np.ones(len(seats_N), bool)
            special_N[sits_N] = self._reveal(here, here, tokens_N[sits_N])
        return Sampled(step.who_samples(), tokens_N, special_N, sits_N, _logprobs(flight, tokens_N))

    def _reveal_all(self, everyone: Everyone, flight: InFlight, tokens_N: Int32) -> npt.NDArray[np.bool_]:
        """``_reveal`` of those who all sit still."""
        seats, counters, known_N = self._seats, self._seats.counters_CS, flight.known_N
        assert known_N is not None
        seats.tokens_F[everyone.firsts_B + known_N] = tokens_N
        counters[NUM_UNKNOWN, everyone.at] -= 1
        special: npt.NDArray[np.bool_] = known_N >= everyone.last_B
        if np.minimum.reduce(tokens_N) < 0:
            special |= tokens_N < 0
        if everyone.stops:
            special |= everyone.stops_B
        if flight.began:
            special |= known_N == counters[NUM_PROMPT, everyone.at]
        if everyone.ends:
            for token in self._eos:
                ends = tokens_N == token
                if ends.any():
                    special |= ends & everyone.ends_B & (known_N + 1 >= counters[MIN_TOTAL, everyone.at])
        return special

    def _reveal(self, at: slice | Int32, seats_N: Int32, tokens_N: Int32) -> npt.NDArray[np.bool_]:
        """Give each seat its token; whose answer has perhaps ended or just begun."""
        seats, counters = self._seats, self._seats.counters_CS
        known = counters[NUM_TOKENS, at] - counters[NUM_UNKNOWN, at]
        seats.tokens_SL[seats_N, known] = tokens_N
        counters[NUM_UNKNOWN, at] -= 1
        known += 1
        special: npt.NDArray[np.bool_] = (tokens_N < 0) | seats.stops_S[at]
        special |= known >= counters[MAX_TOTAL, at]
        special |= known == counters[NUM_PROMPT, at] + 1
        for token in self._eos:
            ends = tokens_N == token
            if ends.any():
                special |= ends & seats.ends_S[at] & (known >= counters[MIN_TOTAL, at])
        return special


def _logprobs(flight: InFlight, tokens_N: Int32) -> list[TokenLogprobs | None] | None:
    wanted_N = flight.inputs.logprobs_N
    found = flight.pending.logprobs() if wanted_N is not None else None
    if wanted_N is None or found is None:
        return None
    most = max(0, int(wanted_N.max()))
    ids_kN = np.concatenate([tokens_N[None], found.token_ids_Nk[:, :most].T]).tolist()
    logprobs_kN = np.concatenate([found.chosen_N[None], found.logprobs_Nk[:, :most].T]).tolist()
    rows = zip(*ids_kN, strict=True), zip(*logprobs_kN, strict=True), found.ranks_N.tolist()
    all_N: list[TokenLogprobs | None] = list(map(TokenLogprobs, *rows))
    for n in np.flatnonzero((wanted_N < most) | (tokens_N < 0)).tolist():
        whole, count = all_N[n], int(wanted_N[n]) + 1
        assert whole is not None
        fewer = TokenLogprobs(whole.token_ids[:count], whole.logprobs[:count], whole.rank)
        all_N[n] = fewer if count and tokens_N[n] >= 0 else None
    return all_N
