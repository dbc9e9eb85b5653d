"""What a step samples by, where the session does it itself: from the seats, or from the step before. Hot."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pelton.engine.batch_sampling import Float32, LogitsEdits, SamplingInputs
from pelton.kernels.sampling.reference import uniforms
from pelton.runtime.sampler import logits_processor
from pelton.runtime.scheduled import StepArrays
from pelton.runtime.seats import MIN_TOTAL, NUM_TOKENS, Everyone, Seats
from pelton.runtime.sequence import Sequence

Int32 = npt.NDArray[np.int32]

_BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))
#: Random numbers of so many steps are made at once: they cost little more than those of one.
_STEPS = 16


def sampling_inputs(step: StepArrays, seats: Seats) -> SamplingInputs:
    """The parameters of the next token of each member of ``step`` that samples."""
    seats_N = step.seats_that_sample()
    temperature_N, logprobs_N = seats.temperature_S[seats_N], seats.logprobs_S[seats_N]
    if temperature_N.any():
        positions_N = seats.counters_CS[NUM_TOKENS, seats_N].astype(np.int64)
        uniform_N = _float32(uniforms(seats.seed_S[seats_N], positions_N))
    else:
        uniform_N = np.zeros(len(seats_N), np.float32)
    edited = seats.edited_S[seats_N].any()
    return SamplingInputs(
        temperature_N=temperature_N,
        top_k_N=seats.top_k_S[seats_N],
        top_p_N=seats.top_p_S[seats_N],
        min_p_N=seats.min_p_S[seats_N],
        uniform_N=uniform_N,
        edits=_edits(seats, seats_N, step.who_samples()) if edited else None,
        logprobs_N=logprobs_N if (logprobs_N >= 0).any() else None,
    )


def next_inputs(before: SamplingInputs, everyone: Everyone, seats: Seats, known_N: Int32) -> SamplingInputs:
    """Those of the step after ``before``, where ``everyone`` decoded and decodes again; ``known_N``: tokens
    that each has."""
    uniform_N, edits = before.uniform_N, before.edits
    if everyone.draws:
        if not everyone.random:
            positions_KN = known_N + np.arange(_STEPS, dtype=np.int64)[:, None]
            everyone.random = list(_float32(uniforms(everyone.seed_B, positions_KN)))[::-1]
        uniform_N = everyone.random.pop()
    if edits is not None:
        edits = _next_edits(edits, everyone, seats, known_N)
    if uniform_N is before.uniform_N and edits is before.edits:
        return before
    return replace(before, uniform_N=uniform_N, edits=edits)


def _float32(numbers: npt.NDArray[np.float64]) -> Float32:
    """Rounded, and still below 1."""
    return np.minimum(numbers.astype(np.float32), _BELOW_ONE)


def _edits(seats: Seats, seats_N: Int32, sequences: Seq[Sequence]) -> LogitsEdits:
    edited_N = seats.edited_S[seats_N]
    new = np.flatnonzero(edited_N & ~seats.begun_S[seats_N]).tolist()
    begins = [logits_processor(sequences[n]).device_edits(sequences[n]) for n in new]
    seats.begun_S[seats_N[new]] = True
    counters = seats.counters_CS
    return LogitsEdits(
        begins=begins,
        seat_N=np.where(edited_N, seats_N, np.int32(-1)),
        masked_N=seats.masked_S[seats_N],
        short_N=(counters[NUM_TOKENS, seats_N] < counters[MIN_TOTAL, seats_N]).astype(np.int32),
        repetition_N=seats.repetition_S[seats_N],
        frequency_N=seats.frequency_S[seats_N],
        presence_N=seats.presence_S[seats_N],
    )


def _next_edits(edits: LogitsEdits, everyone: Everyone, seats: Seats, known_N: Int32) -> LogitsEdits:
    if edits.short_N.any():
        short_N = (known_N < seats.counters_CS[MIN_TOTAL, everyone.at]).astype(np.int32)
        return replace(edits, begins=(), short_N=short_N)
    return replace(edits, begins=()) if edits.begins else edits
