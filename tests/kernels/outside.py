"""An op and tactics from outside Pelton, as a user's package would have them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from pelton.kernels.user_op import op
from pelton.kernels.user_tactic import tactic

C_SOURCE = """
#include <math.h>
#include "pelton_kernel.h"

void swish_norm_c(const pelton_kernel_args* a) {
  const pelton_tensor *x = a->in[0], *out = a->out[0];
  const float beta = (float)a->attrs[0];
  int64_t first, last, n = pelton_last_dim(x);
  pelton_share(a, pelton_rows(x), &first, &last);
  for (int64_t r = first; r < last; r++) {
    const float* row = pelton_row(x, r);
    float *to = pelton_row(out, r), sum = 0;
    for (int64_t i = 0; i < n; i++) {
      to[i] = row[i] / (1.0f + expf(-beta * row[i]));
      sum += to[i] * to[i];
    }
    const float scale = 1.0f / sqrtf(sum / (float)n + 1e-6f);
    for (int64_t i = 0; i < n; i++) to[i] *= scale;
  }
}
"""


def samples(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    yield torch.randn(5, 33, generator=generator), 1.5
    yield torch.randn(4, 200, generator=generator)[:, 60:124], 0.5
    yield torch.randn(1, 3, 64, generator=generator), 1.0


@op("outside::swish_norm(Tensor x, float beta) -> Tensor", tolerance={"float32": 1e-5}, samples=samples)
def swish_norm(x, beta):  # type: ignore[no-untyped-def]
    y = x * torch.sigmoid(beta * x)
    return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)


@tactic("outside::swish_norm")
def swish_norm_numpy(x, beta, out):  # type: ignore[no-untyped-def]
    y = x / (1 + np.exp(-beta * x))
    out[...] = y / np.sqrt(np.square(y).mean(-1, keepdims=True) + 1e-6)


@tactic("outside::swish_norm", source=C_SOURCE)
def swish_norm_c() -> None: ...


def mean_and_rest_samples(generator: torch.Generator) -> Iterator[tuple[Any, ...]]:
    x = torch.randn(4, 9, generator=generator)
    yield x, None, "half"
    yield x, torch.randn(9, generator=generator), "whole", True


@op(
    "outside::mean_and_rest(Tensor x, Tensor? weight, str part, bool negate=False) -> (Tensor, Tensor)",
    samples=mean_and_rest_samples,
)
def mean_and_rest(x, weight, part, negate=False):  # type: ignore[no-untyped-def]
    mean = x.mean(-1, keepdim=True) * (0.5 if part == "half" else 1.0)
    rest = x - mean if weight is None else (x - mean) * weight
    return mean, -rest if negate else rest


@tactic("outside::mean_and_rest")
def mean_and_rest_numpy(x, weight, part, negate, out):  # type: ignore[no-untyped-def]
    mean, rest = out
    mean[...] = x.mean(-1, keepdims=True) * (0.5 if part == "half" else 1.0)
    rest[...] = (x - mean) * (1 if weight is None else weight) * (-1 if negate else 1)
