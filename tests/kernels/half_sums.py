"""Cases that tell which sums are in float16 and which are not."""

from __future__ import annotations

import torch

from pelton.ir.float16_sums import COLUMNS
from pelton.ir.op import Sample, get_op
from pelton.ir.ops import paged_attention
from pelton.kernels.conformance_cuda import Case
from pelton.kernels.tactic import all_tactics

_TOKENS, _RESULTS, _INNER = 5, 40, 3 * COLUMNS


def _product(name: str, values: dict[int, float], residual: float, tactic: str = "half_sums") -> Case:
    """Sums of ``values``, which are x's by column, plus ``residual``."""
    x = torch.zeros(_TOKENS, _INNER, dtype=torch.float16)
    for column, value in values.items():
        x[:, column] = value
    weight = torch.ones(_RESULTS, _INNER, dtype=torch.float16)
    args = (x, weight, None, torch.full((_TOKENS, _RESULTS), residual, dtype=torch.float16))
    found = all_tactics()[f"cuda.linear_add.{tactic}"]
    return Case(get_op("linear_add"), Sample(args=args, name=name), found, "float16")


def rounded(tactic: str) -> Case:
    """A sum of 2051 of ``COLUMNS`` columns, which is no float16: less 2048 it is 2 or 4, and in float32 3."""
    values = {0: 2048.0, 1: 1.0, COLUMNS - 1: 1.0, COLUMNS - 2: 1.0}
    return _product("2048, 1 and 1 + 1 in one sum", values, -2048.0, tactic)


def exact() -> list[Case]:
    """What would round, or be infinite, if sums in float16 were longer, or scores were scaled behind them."""
    apart = {0: 2048.0, COLUMNS: 1.0, 2 * COLUMNS: 1.0}
    large = {0: 40000.0, COLUMNS: 40000.0, 2 * COLUMNS: -50000.0}
    return [
        _product("2048, 1 and 1 in sums of their own", apart, -2048.0),
        _product("40000, 40000 and -50000 in sums of their own", large, -29000.0),
        _overflowing(),
    ]


def _overflowing() -> Case:
    """Products of queries and keys of up to 81920, scores of up to 7241."""
    g = torch.Generator().manual_seed(0)
    sample = paged_attention.make_sample(g, lens=[(20, 70), (5, 5)], dim=128, block_size=16)
    q, k_cache, v_cache, *rest = sample.args
    q, k_cache = 40 * torch.sign(q), 16 * torch.sign(k_cache)
    q[..., :100], k_cache[..., :100] = 40.0, 16.0
    args = (q.half(), k_cache.half(), v_cache.half(), *rest)
    tactic = all_tactics()["cuda.paged_attention.half_sums"]
    return Case(get_op("paged_attention"), Sample(args=args, name="large scores"), tactic, "float16")
