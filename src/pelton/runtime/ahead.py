"""Running one step ahead of the host, on a session that samples by itself (``Session.submit``).

While step N runs, step N+1 is scheduled and submitted: a sequence's token that N is still sampling stands
in N+1's ids as a placeholder, which the device replaces. So the device never waits for the host. What the
host learns late costs at most one step: a sequence that ends with N's token has been computed once more, and
that result is dropped; its blocks may be given away at once, since the device works in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from pelton.engine.batch_sampling import PendingStep, SamplingInputs
from pelton.kernels.sampling.reference import uniforms
from pelton.runtime.input_batch import InputBatchBuilder
from pelton.runtime.sampler import logits_processor
from pelton.runtime.scheduler import ScheduledSequence, Scheduler
from pelton.runtime.sequence import Sequence

_BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))


def needs_host(sequence: Sequence) -> bool:
    """Whether tokens depend on more than the sampler's parameters: log-probabilities, masks, penalties."""
    params = sequence.request.sampling
    if params.logprobs is not None or params.prompt_logprobs is not None or params.min_tokens > 0:
        return True
    return not logits_processor(sequence).is_noop(sequence)


def sampling_inputs(sequences: Seq[Sequence]) -> SamplingInputs:
    """The parameters of each sequence's next token."""
    params = [q.request.sampling for q in sequences]
    seeds = np.array([(q.request.seed or 0) & (1 << 64) - 1 for q in sequences], np.uint64)
    positions = np.array([q.num_tokens for q in sequences], np.int64)
    return SamplingInputs(
        temperature_N=np.array([p.temperature for p in params], np.float32),
        top_k_N=np.array([p.top_k for p in params], np.int32),
        top_p_N=np.array([p.top_p for p in params], np.float32),
        min_p_N=np.array([p.min_p for p in params], np.float32),
        uniform_N=np.minimum(uniforms(seeds, positions).astype(np.float32), _BELOW_ONE),
    )


@dataclass(frozen=True)
class InFlight:
    """A submitted step."""

    scheduled: Seq[ScheduledSequence]
    preemptions: Seq[int]
    """How often each member had been preempted when the step was submitted."""
    pending: PendingStep

    def results(self) -> Iterator[tuple[ScheduledSequence, bool, int | None]]:
        """Each member, whether it still has the blocks that the step filled, and the token it sampled
        (None: it did not). Waits."""
        tokens = iter(self.pending.tokens().tolist())
        for s, preemptions in zip(self.scheduled, self.preemptions, strict=True):
            yield s, s.sequence.num_preemptions == preemptions, next(tokens) if s.samples else None


class Ahead:
    """At most one step in flight on ``session``."""

    def __init__(self, session: Any, scheduler: Scheduler, batches: InputBatchBuilder) -> None:
        self._session, self._scheduler, self._batches = session, scheduler, batches
        self.in_flight: InFlight | None = None

    @property
    def available(self) -> bool:
        """Whether the session samples by itself."""
        return bool(getattr(self._session, "samples", False))

    def take(self) -> InFlight | None:
        """The step in flight, which is now the caller's."""
        flight, self.in_flight = self.in_flight, None
        return flight

    def submit(self, scheduled: Seq[ScheduledSequence]) -> None:
        """Start a step; its members' state is as it will be when the step is over."""
        sampling = [s.sequence for s in scheduled if s.samples]
        pending = self._session.submit(self._batches.build(scheduled), sampling_inputs(sampling))
        preemptions = [s.sequence.num_preemptions for s in scheduled]
        for row, sequence in enumerate(sampling):
            sequence.expect(-1 - row)
        for s in scheduled:
            self._scheduler.advance(s.sequence, s.num_computed + s.num_new)
        self.in_flight = InFlight(scheduled, preemptions, pending)
