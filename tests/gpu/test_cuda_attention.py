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
from pelton.kernels.conformance_cuda import Case, call_of, check
from pelton.kernels.gpu.driver import Device
from pelton.kernels.tactic import all_tactics

pytestmark = pytest.mark.gpu
OP = get_op("paged_attention")
TACTICS = sorted(
    t.name for t in all_tactics().values() if t.op == OP.name and t.batch_invariant and t.launches
)
#: Keys of a sequence that is one part for every kernel, and of one that blocks may share.
KEYS, MANY = 400, 2500


def parts_of(keys: int) -> dict[str, list[tuple[int, int]]]:
    """Tokens of one sequence, (from, to), as sequences of one step."""
    some = range(keys) if keys == KEYS else range(40, keys, 61)
    return {
        "in chunks": [(0, 1), (1, keys // 3), (keys // 3, 2 * keys // 3 - 9), (2 * keys // 3 - 9, keys)],
        "token by token": [(i, i + 1) for i in some],
        "in another order": [(keys - 1, keys), (13, 250), (250, keys - 1), (0, 13)],
        "alone": [(keys - 1, keys)],
        "a few": [(keys - 4, keys)],
        "two": [(keys // 2, keys // 2 + 1), (keys - 2, keys)],
        "beside a longer one": [(99, 100), (keys - 1, keys), (511, 512)] if keys > 512 else [(0, 1)],
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
    ("dim", "window", "keys", "sinks"),
    [
        (128, 100, KEYS, False),
        (128, 0, MANY, True),
        pytest.param(64, 0, KEYS, True, marks=pytest.mark.slow),
        pytest.param(64, 0, MANY, False, marks=pytest.mark.slow),
        pytest.param(128, 0, KEYS, False, marks=pytest.mark.slow),
    ],
)
def test_a_token_has_the_same_bits_in_any_company(
    name: str, dim: int, window: int, keys: int, sinks: bool, tmp_path: Path
) -> None:
    tactic = all_tactics()[name]
    g = torch.Generator().manual_seed(0)
    made = make_sample(
        g,
        lens=[(keys, keys)],
        heads=(8, 2),
        dim=dim,
        block_size=16,
        window=window,
        dtype=torch.bfloat16,
        sinks=sinks,
    )
    sample = Sample(args=(made.args[0].bfloat16(), *made.args[1:]), name="whole")
    if tactic.sm not in (0, Device().sm) or not tactic.supports(node_spec(OP, sample)):
        pytest.skip("the tactic does not take this on this GPU")
    parts = parts_of(keys)
    samples = [sample, *(part(sample, own, what) for what, own in parts.items())]
    few = [(0, 1), (256, 257), (keys - 1, keys)]
    samples.append(part(sample, few, "padded as graphs are", padding=5))
    cases = [Case(OP, s, tactic, "bfloat16") for s in samples]
    compile_cases(cases, Device().sm, tmp_path / "kernels")
    with DeviceRunner(tmp_path / "kernels") as runner:
        check(cases[0], runner)
        whole, *others = [runner(case, call_of(case)).outputs[0] for case in cases]
        check(cases[1 + list(parts).index("alone")], runner)
    for got, (what, own) in zip(others, [*parts.items(), ("padded", few)], strict=True):
        want = torch.cat([whole[start:stop] for start, stop in own])
        assert torch.equal(got[: len(want)].view(torch.int16), want.view(torch.int16)), what
