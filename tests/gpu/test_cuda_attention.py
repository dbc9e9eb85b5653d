"""Attention kernels of deterministic engines: a token's result has the same bits in any company."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from pelton.builder.cuda_conformance import DeviceRunner, compile_cases
from pelton.ir.op import Sample, get_op
from pelton.ir.ops.paged_attention import make_sample
from pelton.kernels.conformance import node_spec
from pelton.kernels.conformance_cuda import Case, call_of
from pelton.kernels.gpu.driver import Device
from pelton.kernels.tactic import all_tactics

pytestmark = pytest.mark.gpu
OP = get_op("paged_attention")
TACTICS = sorted(
    t.name for t in all_tactics().values() if t.op == OP.name and t.batch_invariant and t.launches
)
KEYS = 400
#: Tokens of one sequence, (from, to), as sequences of one step.
PARTS = {
    "in chunks": [(0, 1), (1, 130), (130, 257), (257, KEYS)],
    "token by token": [(i, i + 1) for i in range(KEYS)],
    "in another order": [(KEYS - 1, KEYS), (13, 250), (250, KEYS - 1), (0, 13)],
}


def part(sample: Sample, parts: Sequence[tuple[int, int]], name: str, padding: int = 0) -> Sample:
    """The sample's one sequence as several over the same blocks; behind them ``padding`` without keys."""
    q, k_cache, v_cache, table, _, _, *rest = sample.args
    tokens = [*(stop - start for start, stop in parts), *[1] * padding]
    ends = torch.tensor([0, *tokens]).cumsum(0).int()
    lens = torch.tensor([*(stop for _, stop in parts), *[0] * padding], dtype=torch.int32)
    some = torch.cat([*(q[start:stop] for start, stop in parts), q[:padding]])
    return Sample(args=(some, k_cache, v_cache, table.repeat(len(tokens), 1), ends, lens, *rest), name=name)


@pytest.mark.parametrize("name", TACTICS)
@pytest.mark.parametrize(
    ("dim", "window"), [(128, 100), *(pytest.param(d, 0, marks=pytest.mark.slow) for d in (64, 128))]
)
def test_a_token_has_the_same_bits_in_any_company(name: str, dim: int, window: int, tmp_path: Path) -> None:
    tactic = all_tactics()[name]
    g = torch.Generator().manual_seed(0)
    made = make_sample(
        g, lens=[(KEYS, KEYS)], heads=(8, 2), dim=dim, block_size=16, window=window, dtype=torch.bfloat16
    )
    sample = Sample(args=(made.args[0].bfloat16(), *made.args[1:]), name="whole")
    if tactic.sm not in (0, Device().sm) or not tactic.supports(node_spec(OP, sample)):
        pytest.skip("the tactic does not take this on this GPU")
    samples = [sample, *(part(sample, parts, what) for what, parts in PARTS.items())]
    few = [(0, 1), (256, 257), (KEYS - 1, KEYS)]
    samples.append(part(sample, few, "padded as graphs are", padding=5))
    cases = [Case(OP, s, tactic, "bfloat16") for s in samples]
    compile_cases(cases, Device().sm, tmp_path / "kernels")
    with DeviceRunner(tmp_path / "kernels") as runner:
        whole, *others = [runner(case, call_of(case)).outputs[0] for case in cases]
    for got, (what, parts) in zip(others, [*PARTS.items(), ("padded", few)], strict=True):
        want = torch.cat([whole[start:stop] for start, stop in parts])
        assert torch.equal(got[: len(want)].view(torch.int16), want.view(torch.int16)), what
