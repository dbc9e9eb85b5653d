"""The sampler: next tokens from logits. Random numbers are keyed by (request seed, position), so that a
token never depends on what else is in the batch, on chunking or on preemption. Hot."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pelton.kernels.sampling import log_softmax_topk
from pelton.kernels.sampling import sample as sample_kernel
from pelton.runtime.logits import LogitsProcessor
from pelton.runtime.request import TokenLogprobs
from pelton.runtime.scheduled import ScheduledSequence
from pelton.runtime.sequence import Sequence

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


NO_TOKEN_LEFT = (
    "allowed_token_ids, bad_words, logit_bias and min_tokens together exclude every token; loosen one of them"
)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sequence's next token, or why there is none."""

    token: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


def logits_processor(sequence: Sequence) -> LogitsProcessor:
    """The sequence's processor, made at its first use."""
    if sequence.processor is None:
        sequence.processor = LogitsProcessor(sequence)
    assert isinstance(sequence.processor, LogitsProcessor)
    return sequence.processor


def not_finite(position: int) -> str:
    """The sentence for a row of logits without a finite maximum."""
    return (
        f"the model's logits at position {position} are not finite; "
        "check the checkpoint's weights, or build with a wider dtype"
    )


def sample(logits_NV: Float32, sequences: Seq[Sequence]) -> list[Sampled]:
    """The next token of each sequence; row i of ``logits_NV`` (float32, left unchanged) is that of
    ``sequences[i]``. Sequences are not changed either."""
    num_rows = len(sequences)
    greedy_N: Int64 = logits_NV.argmax(axis=1)  # argmax takes a NaN for the largest value
    broken_N = ~np.isfinite(logits_NV[np.arange(num_rows), greedy_N])
    tokens = greedy_N.tolist()
    excluded: set[int] = set()
    rows = [
        i
        for i, sequence in enumerate(sequences)
        if not broken_N[i]
        and (sequence.request.sampling.temperature > 0 or not logits_processor(sequence).is_noop(sequence))
    ]
    if rows:
        chosen, excluded = _sample_rows(logits_NV, sequences, rows)
        for i, token in zip(rows, chosen, strict=True):
            tokens[i] = token
    logprobs = _generated_logprobs(logits_NV, sequences, tokens, broken_N)
    results = []
    for i, sequence in enumerate(sequences):
        if broken_N[i]:
            results.append(Sampled(-1, error=not_finite(sequence.num_tokens - 1)))
        elif i in excluded:
            results.append(Sampled(-1, error=NO_TOKEN_LEFT))
        else:
            results.append(Sampled(tokens[i], logprobs.get(i)))
    return results


def token_logprobs(logits_NV: Float32, tokens: Seq[int], num_alternatives: Seq[int]) -> list[TokenLogprobs]:
    """Log-probabilities and ranks of ``tokens``, one per row of ``logits_NV`` (float32, finite maxima),
    each followed by its row's ``num_alternatives[i]`` most likely tokens."""
    most = min(max(num_alternatives), logits_NV.shape[1])
    chosen_N, ranks_N, ids_Nk, values_Nk = log_softmax_topk(logits_NV, np.asarray(tokens, np.int32), most)
    return [
        TokenLogprobs((token, *ids[:k]), (chosen, *values[:k]), rank)
        for token, k, chosen, rank, ids, values in zip(
            tokens,
            num_alternatives,
            chosen_N.tolist(),
            ranks_N.tolist(),
            ids_Nk.tolist(),
            values_Nk.tolist(),
            strict=True,
        )
    ]


def score_prompt(s: ScheduledSequence, logits_NV: Float32) -> tuple[list[TokenLogprobs], str | None]:
    """Log-probabilities of the prompt tokens that the chunk's prompt rows predict, or an error."""
    wanted = s.sequence.request.sampling.prompt_logprobs
    assert wanted is not None
    finite_N = np.isfinite(logits_NV.max(axis=1))  # max takes a NaN for the largest value
    if not finite_N.all():
        return [], not_finite(s.first_prompt_row + int(finite_N.argmin()))
    targets = s.sequence.tokens[s.first_prompt_row + 1 : s.last_prompt_row + 1].tolist()
    return token_logprobs(logits_NV, targets, [wanted] * len(targets)), None


def _generated_logprobs(
    logits_NV: Float32, sequences: Seq[Sequence], tokens: list[int], broken_N: npt.NDArray[np.bool_]
) -> dict[int, TokenLogprobs]:
    """Those of the rows that ask for them: of the model's own logits, before masks and penalties."""
    wanted = {
        i: sequence.request.sampling.logprobs
        for i, sequence in enumerate(sequences)
        if sequence.request.sampling.logprobs is not None and not broken_N[i]
    }
    if not wanted:
        return {}
    rows = list(wanted)
    alternatives = [k for k in wanted.values() if k is not None]
    return dict(
        zip(rows, token_logprobs(logits_NV[rows], [tokens[i] for i in rows], alternatives), strict=True)
    )


def _sample_rows(logits_NV: Float32, sequences: Seq[Sequence], rows: list[int]) -> tuple[list[int], set[int]]:
    """Tokens of ``rows``, which need more than an argmax, and those rows whose every token is masked."""
    work_MV = logits_NV[rows]
    batch = [sequences[i] for i in rows]
    tokens, excluded, drawn = [-1] * len(rows), set(), []
    for j, sequence in enumerate(batch):
        processor, row_V = logits_processor(sequence), work_MV[j]
        if not processor.is_noop(sequence):
            processor.apply(row_V, sequence)
            tokens[j] = int(row_V.argmax())
            if row_V[tokens[j]] == -np.inf:
                excluded.add(rows[j])
                continue
        if sequence.request.sampling.temperature > 0:
            drawn.append(j)
    if drawn:
        kept_KV = work_MV if len(drawn) == len(rows) else work_MV[drawn]
        params = [batch[j].request.sampling for j in drawn]
        ids_K, _ = sample_kernel(
            kept_KV,
            np.array([p.temperature for p in params], np.float32),
            np.array([p.top_k for p in params], np.int32),
            np.array([p.top_p for p in params], np.float32),
            np.array([p.min_p for p in params], np.float32),
            np.array([batch[j].request.seed for j in drawn], np.uint64),
            np.array([batch[j].num_tokens for j in drawn], np.int64),
            want_logprobs=False,
        )
        for j, token in zip(drawn, ids_K.tolist(), strict=True):
            tokens[j] = token
    return tokens, excluded
