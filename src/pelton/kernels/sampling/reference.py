"""Sampling, defined in numpy. The native library gives the same tokens (``native.py``).

One row at a time, for logits l, temperature t > 0:

1. NaN counts as minus infinity. x = (l - max l) / t and w = exp(x) in float32, with the exponential
   below (only IEEE additions and multiplications, so that C computes the same bits).
2. top_k: the k largest logits stay; of equal ones those with the lower index.
3. top_p: of what is left, in descending order (equal ones by index), the shortest beginning whose
   weights sum to at least top_p times the sum of all that is left stays: at least one token.
4. min_p: the weight of tokens with w < min_p becomes 0 (the largest weight is 1).
5. The token is the first, in index order, at which the running sum of the weights that stayed exceeds u
   times their sum.

Sums run in float64. The sum of step 3's beginning runs in its order; all others by blocks of 1024
(``_block_sums``), which is fast and exactly defined.

u in [0, 1) comes from SplitMix64 (Steele, Lea & Flood, 2014): output number ``position`` of the generator
whose state is ``mix(seed)``; so it depends on (seed, position) alone, never on the batch. Temperature 0 is
the arg max, the lowest index among equals. A row's log-probability is that of the chosen token under
softmax(l), before temperature and truncation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int32 = npt.NDArray[np.int32]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

_LOG2_E = np.float32(1.44269504)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
#: exp(r) = 1 + r + r^2 p(r) on |r| <= ln(2)/2 (Cephes' expf, Moshier 1989), highest power first.
_POLYNOMIAL = tuple(
    np.float32(c)
    for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
)


def exp32(x: Float32) -> Float32:
    """exp of float32 x <= 0, to about 1e-7; 0 below -87."""
    safe = np.maximum(x, np.float32(-87))
    n = np.rint(safe * _LOG2_E)
    r = safe - n * _LN2_HIGH - n * _LN2_LOW
    p = np.full_like(r, _POLYNOMIAL[0])
    for c in _POLYNOMIAL[1:]:
        p = p * r + c
    y = p * (r * r) + r + np.float32(1)
    scale = ((n.astype(np.int32) + 127) << 23).view(np.float32)
    return np.where(x < np.float32(-87), np.float32(0), y * scale)


def _mix(z: int) -> int:
    """SplitMix64's output function."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def uniform(seed: int, position: int) -> float:
    """The random number of (seed, position) in [0, 1): seed modulo 2^64, position >= 0."""
    z = _mix((_mix(seed & _MASK) + (position + 1) * _GOLDEN) & _MASK)
    return (z >> 11) * 2.0**-53


def uniforms(seed_N: npt.NDArray[np.uint64], position_N: npt.NDArray[np.int64]) -> Float64:
    """``uniform`` of each (seed, position)."""

    def mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    with np.errstate(over="ignore"):
        z = mix(mix(seed_N) + (position_N.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN))
    result: Float64 = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return result


def _block_sums(w: Float32) -> Float64:
    """Sums of blocks of 1024 (the last filled up with zeros): 16 interleaved sums, then added in order."""
    padded = np.zeros(-(-len(w) // 1024) * 1024, np.float64)
    padded[: len(w)] = w
    lanes = np.cumsum(padded.reshape(-1, 64, 16), axis=1)[:, -1]
    sums: Float64 = np.cumsum(lanes, axis=1)[:, -1]
    return sums


def _sum(w: Float32) -> float:
    return float(np.cumsum(_block_sums(w))[-1])


def _draw(w: Float32, u: float) -> int:
    """Index at which the running sum exceeds u times the sum; rounding may leave it to the last w > 0."""
    sums = _block_sums(w)
    ends = np.cumsum(sums)
    block = int(np.searchsorted(ends, u * ends[-1], side="right"))
    if block < len(sums):
        start = ends[block - 1] if block else 0.0
        part = w[block * 1024 : (block + 1) * 1024]
        running = np.cumsum(np.concatenate([[start], part.astype(np.float64)]))[1:]
        inside = int(np.searchsorted(running, u * ends[-1], side="right"))
        return block * 1024 + (inside if inside < len(part) else int(np.flatnonzero(part)[-1]))
    return int(np.flatnonzero(w)[-1])


def _clean(logits_V: Float32) -> Float32:
    return np.where(np.isnan(logits_V), np.float32(-np.inf), logits_V)


def _log_sum_exp(l_V: Float32) -> tuple[np.float32, float]:
    """max(l) and log(sum(exp(l - max))), 0 where the maximum is not finite."""
    top = l_V.max()
    if not np.isfinite(top):
        return top, 0.0
    return top, float(np.log(_sum(exp32(l_V - top))))


def _logprob(l_V: Float32, token: int, top: np.float32, log_sum: float) -> np.float32:
    if np.isneginf(l_V[token]):
        return np.float32(-np.inf)
    return np.float32(float(l_V[token] - top) - log_sum)


def _choose(l_V: Float32, t: np.float32, top_k: int, top_p: float, min_p: float, u: float) -> int:
    w = exp32((l_V - l_V.max()) / t)
    kept = None
    if 0 < top_k < len(w):
        kept = np.sort(np.argsort(-l_V, kind="stable")[:top_k])
    if top_p < 1:
        kept = np.arange(len(w)) if kept is None else kept
        order = kept[np.argsort(-l_V[kept], kind="stable")]
        running = np.cumsum(w[order], dtype=np.float64)
        reach = int(np.searchsorted(running, top_p * _sum(w[kept]), side="left"))
        kept = np.sort(order[: reach + 1])
    weights = w if kept is None else w[kept]
    token = _draw(np.where(weights < np.float32(min_p), np.float32(0), weights), u)
    return token if kept is None else int(kept[token])


def sample(
    logits_NV: Float32,
    temperature_N: Sequence[float] | Float32,
    top_k_N: Sequence[int] | Int32,
    top_p_N: Sequence[float] | Float32,
    min_p_N: Sequence[float] | Float32,
    seed_N: Sequence[int] | npt.NDArray[np.uint64],
    position_N: Sequence[int] | npt.NDArray[np.int64],
    *,
    want_logprobs: bool = True,
) -> tuple[Int32, Float32]:
    """One token per row of ``logits_NV`` (float32, rows of any stride): ids (N,) and log-probabilities (N,).

    Temperature 0: greedy. top_k 0: all; top_p 1: all; min_p 0: all. The rules are in the module's text.
    Temperature, top_p and min_p are rounded to float32. Without ``want_logprobs`` the log-probabilities
    are zeros.
    """
    n = len(logits_NV)
    tokens, logprobs = np.zeros(n, np.int32), np.zeros(n, np.float32)
    for i in range(n):
        l_V = _clean(logits_NV[i])
        top = l_V.max()
        t = np.float32(temperature_N[i])
        if t == 0 or not np.isfinite(top):
            token = int(l_V.argmax())
        else:
            token = _choose(
                l_V,
                t,
                int(top_k_N[i]),
                float(np.float32(top_p_N[i])),
                float(np.float32(min_p_N[i])),
                uniform(int(seed_N[i]), int(position_N[i])),
            )
        tokens[i] = token
        if want_logprobs:
            logprobs[i] = _logprob(l_V, token, *_log_sum_exp(l_V))
    return tokens, logprobs


def log_softmax_topk(
    logits_NV: Float32, chosen_N: Sequence[int] | Int32, k: int
) -> tuple[Float32, Int32, Int32, Float32]:
    """Log-probabilities to report: of the chosen tokens, and of the ``k`` most likely of each row.

    Returns ``(chosen_logprobs_N, ranks_N, token_ids_Nk, logprobs_Nk)``: float32, int32, int32, float32. A
    rank is 1 plus the number of tokens with a larger logit; alternatives descend, equal ones by index.
    ``k`` is at most V.
    """
    n = len(logits_NV)
    chosen_logprobs, ranks = np.zeros(n, np.float32), np.zeros(n, np.int32)
    ids, logprobs = np.zeros((n, k), np.int32), np.zeros((n, k), np.float32)
    for i in range(n):
        l_V = _clean(logits_NV[i])
        top, log_sum = _log_sum_exp(l_V)
        chosen = int(chosen_N[i])
        chosen_logprobs[i] = _logprob(l_V, chosen, top, log_sum)
        ranks[i] = 1 + np.count_nonzero(l_V > l_V[chosen])
        ids[i] = np.argsort(-l_V, kind="stable")[:k]
        logprobs[i] = [_logprob(l_V, int(token), top, log_sum) for token in ids[i]]
    return chosen_logprobs, ranks, ids, logprobs
