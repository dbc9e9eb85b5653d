"""The last step of a build: the engine's logits against the eager reference model's.

Both get the same steps (``probe``). Where nothing was rounded (float32 activations, weights stored as
the checkpoint has them) the logits must agree to rounding error; else they are held by KL divergence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pelton.builder.eager import Reference
from pelton.builder.report import QualityReport
from pelton.dtypes import KV_CODES
from pelton.engine.batch import InputBatch
from pelton.engine.session import Session
from pelton.errors import BuildError

#: Largest error relative to the largest logit when nothing was rounded, by type of the KV cache. The
#: 16-bit ones may round a value that differs in its last float32 bit to the neighbouring number.
MAX_ERROR = {"float32": 1e-4, "float16": 1e-3, "bfloat16": 1e-2}
#: Largest mean KL divergence, nats, when weights or activations were rounded.
MAX_KL = 0.05

#: Positions compared at a time.
_ROWS = 4

Float32 = npt.NDArray[np.float32]


def compare(reference: Float32, engine: Float32) -> dict[str, Any]:
    """The fields of a ``QualityReport`` that logits (N, V) determine."""
    kl = divergence(reference, engine)
    # numpy's maximum, which keeps a NaN.
    error = np.max([np.abs(p - q).max() for p, q in zip(_rows(reference), _rows(engine), strict=True)])
    relative = float(error / np.max([np.abs(p).max() for p in _rows(reference)]))
    same = reference.argmax(-1) == engine.argmax(-1)
    return {
        "positions": len(reference),
        "max_error": relative if np.isfinite(relative) else float("inf"),
        "kl_mean": float(kl.mean()),
        "kl_max": float(kl.max()),
        "top1_agreement": float(same.mean()),
    }


def _rows(logits: Float32) -> Iterator[Float32]:
    """A few positions at a time: a vocabulary in float64 is large."""
    return (logits[i : i + _ROWS] for i in range(0, len(logits), _ROWS))


def divergence(reference: Float32, engine: Float32) -> npt.NDArray[np.float64]:
    """KL(reference || engine) of each position, nats; logits (N, V)."""
    parts = []
    for p, q in zip(_rows(reference), _rows(engine), strict=True):
        log_p, log_q = _log_softmax(p), _log_softmax(q)
        parts.append(np.maximum(0.0, (np.exp(log_p) * (log_p - log_q)).sum(-1)))
    return np.concatenate(parts)


def next_token_loss(logits: Float32, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """Negative log-likelihood, nats, of ``ids[1:]`` given the logits (N, V) of all ``ids`` but the last."""
    parts = [_log_softmax(rows) for rows in _rows(logits[:-1])]
    log_p = [part[np.arange(len(part)), ids[1 + i * _ROWS :][: len(part)]] for i, part in enumerate(parts)]
    return -np.concatenate(log_p)


def check_engine(
    session: Session, reference: Reference, steps: Sequence[InputBatch], *, exact: bool
) -> QualityReport:
    """Run ``steps`` on both and compare. Raises ``BuildError`` beyond the bound.

    ``exact``: the engine computes the same values in the same types as the reference.
    """
    pairs = [(reference.run(step), session.run(step).logits_NV.copy()) for step in steps]
    found = compare(*(np.concatenate(side) for side in zip(*pairs, strict=True)))
    kv_dtype = session.config.build.kv_dtype
    assert kv_dtype is not None
    if exact:
        name, value, bound = "max_error", found["max_error"], MAX_ERROR[kv_dtype]
    else:
        name, value, bound = "kl_mean", found["kl_mean"], MAX_KL
    # Written so that NaN fails.
    if not value <= bound:
        raise BuildError(
            f"the engine's logits differ from the model's: {name} {value:.2g} is beyond {bound:.0e} "
            f"({session.runner_name} runner, {found['positions']} positions, top-1 agreement "
            f"{found['top1_agreement']:.1%}); {_what_to_do(kv_dtype)}"
        )
    return QualityReport(runner=session.runner_name, bound=f"{name} <= {bound:.0e}", **found)


def _what_to_do(kv_dtype: str) -> str:
    if kv_dtype not in KV_CODES:
        return "this is a defect of Pelton: please report it"
    others = "fp8, float16 or bfloat16" if kv_dtype == "int8" else "float16 or bfloat16"
    return f"a KV cache of {kv_dtype} is too coarse for this model: build with kv_dtype {others}"


def _log_softmax(logits: Float32) -> npt.NDArray[np.float64]:
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    result: npt.NDArray[np.float64] = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return result
