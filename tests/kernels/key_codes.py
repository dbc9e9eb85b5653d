"""Whether a kernel's codes of keys are the reference's, but for ties of ``kv_codes.look_again``.

Kernels sum a key's score in another order than the reference, and may fuse multiplications with additions: so
of two codes whose change gains almost the same, either may be the one that is changed.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from pelton.ir import kv_codes
from pelton.ir.op import Op, Sample, get_op
from pelton.ir.ops import rope_paged_attention
from pelton.kernels import conformance_cuda as conformance

#: Arguments of rope_paged_attention that the ops which only write have.
_OF = {
    "rope_paged_attention": tuple(range(20)),
    "rope_kv_write": (0, 1, 2, 3, 4, 5, 6, 10, 11, 12, 16, 17, 18, 19),
    "kv_write": (1, 2, 4, 5, 6, 16, 17, 18, 19),
}


def sample_of(op: str, dtype: torch.dtype, *, dim: int = 128, sequences: int = 64) -> Sample:
    """A decode step of ``op`` whose keys are rotated by nothing, so that their values are known exactly."""
    g = torch.Generator().manual_seed(0)
    lens = [(1, 1 + i % 7) for i in range(sequences)]
    sample = rope_paged_attention.make_sample(
        g, lens=lens, heads=(8, 4), dim=dim, block_size=8, dtype=dtype, shifted=True
    )
    sample.args[3].copy_(torch.arange(dim) < dim // 2)
    return replace(sample, args=tuple(sample.args[i] for i in _OF[op]))


def case_of(op: str, tactic: conformance.Tactic, sample: Sample, dtype: str) -> conformance.Case:
    described = get_op(op)
    cache = next(a for a in sample.args if a.dim() == 4)
    # Kernels of cases are told apart by their names.
    cast = conformance._cast(described, sample, dtype, f"{cache.dtype} keys of {cache.shape[3]}")
    return conformance.Case(described, cast, tactic, dtype, decode=tactic.decode is not None)


def check_codes(op: Op, sample: Sample, got: torch.Tensor) -> float:
    """``got``: the cache of keys after the call -> the share of keys that differ; fails where one does and is
    worth less than the reference's to its queries, by more than rounding."""
    names = [p.name for p in op.torch_op._schema.arguments]
    argument = dict(zip(names, sample.args, strict=False))
    scale, queries, slots = argument["k_scale"], argument["k_queries"], argument["slot_mapping"].long()

    def written(**other: torch.Tensor | None) -> torch.Tensor:
        given = argument | {n: argument[n].clone() for n in ("k_cache", "v_cache")} | other
        op.reference(*given.values())
        return rows(given["k_cache"])

    def rows(cache: torch.Tensor) -> torch.Tensor:
        return cache.float().transpose(1, 2).flatten(0, 1)[slots]

    floats = {n: torch.zeros(argument[n].shape) for n in ("k_cache", "v_cache")}
    largest = kv_codes.LARGEST[got.dtype]
    exact = (written(**floats, k_queries=None) / scale[:, None]).clamp(-largest, largest)
    want, mine = written(), rows(got)
    nearest = kv_codes.encode(exact, got.dtype, None).float()
    assert (want != nearest).any(-1).float().mean() > 0.5, "most keys are rounded otherwise"
    other = (mine != want).any(-1)
    worse = _loss(mine - exact, queries) - _loss(want - exact, queries)
    assert (worse <= 1e-5 * _loss(nearest - exact, queries)).all(), "a code is not the one that gains most"
    return float(other.float().mean())


def _loss(error: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    along, apart = queries.double().chunk(2, -1)
    error = error.double()
    return (error * along).sum(-1).square() + (error.square() * apart).sum(-1)
