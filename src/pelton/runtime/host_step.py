"""A step whose tokens the host samples: the session's logits come here."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from pelton.engine.batch import ModelSession
from pelton.runtime.host_time import HostClock
from pelton.runtime.input_batch import InputBatchBuilder
from pelton.runtime.request import TokenLogprobs
from pelton.runtime.sampler import Sampled, sample, score_prompt
from pelton.runtime.scheduled import ScheduledSequence, StepArrays


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step computed for one sequence; nothing is committed yet."""

    prompt_logprobs: tuple[TokenLogprobs, ...]
    sampled: Sampled | None
    error: str | None


def compute(
    session: ModelSession, batches: InputBatchBuilder, scheduled: Seq[ScheduledSequence], clock: HostClock
) -> list[Computed]:
    """Run ``session`` and sample. Changes no sequence."""
    batch = batches.build(StepArrays.of(scheduled))
    with clock.waiting():
        logits_NV = session.run(batch).logits_NV
    ends, row = [], 0
    for s in scheduled:
        row += s.num_rows
        ends.append(row)
    sampling = [(end - 1, s.sequence) for end, s in zip(ends, scheduled, strict=True) if s.samples]
    sampled: dict[int, Sampled] = {}
    if sampling:
        rows = [i for i, _ in sampling]
        logits_SV = logits_NV if len(rows) == len(logits_NV) else logits_NV[rows]
        sampled = dict(zip(rows, sample(logits_SV, [q for _, q in sampling]), strict=True))
    results = []
    for end, s in zip(ends, scheduled, strict=True):
        prompt: list[TokenLogprobs] = []
        error: str | None = None
        if s.last_prompt_row > s.first_prompt_row:
            prompt, error = score_prompt(s, logits_NV[end - s.num_rows : end - s.samples])
        results.append(Computed(tuple(prompt), sampled[end - 1] if s.samples else None, error))
    return results
