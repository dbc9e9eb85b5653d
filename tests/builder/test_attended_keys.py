"""What keys are stored without: the mean of those that attention heeds."""

from __future__ import annotations

import pytest
import torch

import pelton.ir.ops  # noqa: F401  registers the ops
from pelton.builder.attended_keys import AttendedKeys, profile
from pelton.builder.kv_calibration import on_a_code
from pelton.ir import kv_codes
from pelton.ir.ops import paged_attention


def watched(**options: float) -> tuple[AttendedKeys, tuple[torch.Tensor, ...]]:
    g = torch.Generator().manual_seed(0)
    sample = paged_attention.make_sample(g, lens=[(9, 9)], heads=(4, 2), dim=16, block_size=4, **options)
    seen = AttendedKeys([sample.args[1]])
    with seen:
        torch.ops.pelton.paged_attention(*sample.args)
    return seen, sample.args


@pytest.mark.parametrize("window", [0, 3])
def test_keys_count_by_what_an_error_of_theirs_would_do(window: int) -> None:
    """Beside the derivative of each output probability by each key's channel, squared and summed."""
    seen, (q, k_cache, _, table, _, _, scale, *_) = watched(window=window)
    keys = k_cache[table[0].long()].transpose(0, 1).flatten(1, 2)[:, :9]
    for head in range(2):
        weights = torch.zeros(9, 16)
        for query in range(9):
            first = max(0, query - window + 1) if window else 0
            for of_group in (2 * head, 2 * head + 1):
                k = keys[head, first : query + 1].clone().requires_grad_()
                p = (scale * k @ q[query, of_group]).softmax(0)
                for j in range(len(p)):
                    (gradient,) = torch.autograd.grad(p[j], k, retain_graph=True)
                    # Of p_j by k_j: p_j (1 - p_j) scale q; what counts has one factor p_j (1 - p_j), not two.
                    spread = float((p[j] * (1 - p[j])).detach())
                    weights[first + j] += gradient[j].square() / spread if spread else 0
        mean = (weights * keys[head]).sum(0) / weights.sum(0)
        torch.testing.assert_close(seen.means()[0][head], mean, rtol=1e-4, atol=1e-5)


def test_the_profile_of_queries_is_a_direction_and_a_rest() -> None:
    g = torch.Generator().manual_seed(0)
    direction, rest = torch.randn(2, 16, generator=g), torch.rand(2, 16, generator=g)
    q = direction + 0.1 * rest.sqrt() * torch.randn(20000, 2, 16, generator=g)
    along, apart = profile(torch.einsum("thd,the->hde", q, q).double()).chunk(2, 1)
    cosine = (along * direction).sum(1).abs() / along.norm(dim=1) / direction.norm(dim=1)
    assert cosine.min() > 0.999
    torch.testing.assert_close((along.square() + apart).mean(1), torch.ones(2))
    assert 0 <= apart.min() <= apart.max() < 0.1


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_scores_of_queries_that_lie_alike_err_less(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, 64, generator=g) + 0.3 * torch.randn(500, 2, 64, generator=g)
    keys, scale = torch.randn(300, 2, 64, generator=g), torch.tensor([0.05, 0.04])
    queries = profile(torch.einsum("thd,the->hde", q, q).double())
    errors = []
    for given in (None, queries):
        kept = kv_codes.decode(kv_codes.encode(keys, dtype, scale, None, given), scale)
        errors.append(torch.einsum("qhd,khd->hqk", q, kept - keys).square().mean())
    assert errors[1] < 0.6 * errors[0]


@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"sinks": True}])
def test_a_layer_whose_softmax_would_see_a_shift_has_none(options: dict[str, float]) -> None:
    assert watched(**options)[0].means() == {}


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_the_first_key_is_stored_exactly(dtype: torch.dtype) -> None:
    key, shift = torch.randn(2, 2, 64, generator=torch.Generator().manual_seed(0))
    scale = torch.tensor([0.1, 0.05])
    key[1, 5] = 1e4
    moved = on_a_code(key, shift, scale, dtype)
    kept = kv_codes.decode(kv_codes.encode(key[None], dtype, scale, moved), scale)[0] + moved
    inside = torch.ones(2, 64, dtype=torch.bool)
    inside[1, 5] = False
    assert moved[1, 5] == shift[1, 5]
    torch.testing.assert_close(kept[inside], key[inside], rtol=1e-6, atol=1e-6)
    steps = scale[:, None] * (1.0 if dtype == torch.int8 else 2.0**-9)
    if dtype != torch.int8:
        steps = torch.maximum(steps, (key - shift).abs() / 8)
    assert ((moved - shift).abs() <= 0.501 * steps)[inside].all()
