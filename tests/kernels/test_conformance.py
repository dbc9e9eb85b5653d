"""Every native tactic against its op's reference, at every ISA level of this CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from pelton.ir.op import Op, Sample, all_ops  # noqa: E402
from pelton.ir.ops import paged_attention  # noqa: E402
from pelton.kernels import conformance, native  # noqa: E402
from pelton.kernels.tactic import Tactic, all_tactics  # noqa: E402

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")

OPS = sorted(all_ops())
#: Arguments that have one row per token, by op: what the batch-invariance test cuts.
ROW_ARGUMENTS = {
    "activation": (0,),
    "add": (0, 1),
    "add_rms_norm": (0, 1),
    "add_rms_norm_q8": (0, 1),
    "binary": (0, 1),
    "binary_scalar": (0,),
    "copy": (0,),
    "embedding": (0,),
    "gated_activation": (0, 1),
    "layer_norm": (0,),
    "linear": (0,),
    "linear_gated": (0,),
    "linear_gated_q8": (0,),
    "linear_q8": (0,),
    "mul": (0, 1),
    "quantize_q8": (0,),
    "reduce": (0,),
    "rms_norm": (0,),
    "rms_norm_q8": (0,),
    "rope": (0, 1),
    "rope_cos_sin": (0,),
    "rope_interleaved": (0, 1),
    "rope_kv_write": (0, 1, 2, 3, 6),
    "scale": (0,),
    "softcap": (0,),
    "softmax": (0,),
    "take_columns": (0,),
    "take_rows": (1,),
    "unary": (0,),
}


@pytest.fixture(scope="module", params=[1, 2], ids=["1 thread", "2 threads"])
def team(request: pytest.FixtureRequest) -> Iterator[native.Team]:
    torch.set_num_threads(1)
    with native.Team(request.param) as team:
        yield team


def native_tactics(op: str) -> list[Tactic]:
    return [t for t in all_tactics().values() if t.op == op and (t.device, t.kind) == ("cpu", "native")]


#: Ops of GPU plans alone: a CPU computes in float32 throughout.
GPU_ONLY = {"to_float32"}


def test_every_op_has_a_native_tactic() -> None:
    """But for those that passes make only where there is one."""
    needed = {name for name, op in all_ops().items() if not op.optional} - GPU_ONLY
    assert [name for name in sorted(needed) if not native_tactics(name)] == []


def test_every_native_tactic_names_a_kernel() -> None:
    kernels = native.kernel_levels()
    assert [
        t.name
        for t in all_tactics().values()
        if (t.device, t.kind) == ("cpu", "native") and t.name not in kernels
    ] == []


@pytest.mark.parametrize("op", OPS)
def test_tactics_match_the_reference(op: str, team: native.Team) -> None:
    cases = list(conformance.cases(all_ops()[op]))
    assert {c.tactic.name for c in cases} == {t.name for t in native_tactics(op)}, "a tactic has no sample"
    for case in cases:
        conformance.check(case, team)


def rows_of(op: Op, sample: Sample) -> tuple[int, set[int]]:
    """Rows of the sample's result, and which arguments have one each (others broadcast: ``binary``)."""
    given = {i: sample.args[i] for i in ROW_ARGUMENTS[op.name]}
    axes = max(a.dim() for a in given.values())
    rows = max(len(a) for a in given.values() if a.dim() == axes)
    return rows, {i for i, a in given.items() if len(a) == rows}


def cut(op: Op, sample: Sample, row: int) -> Sample:
    _, each = rows_of(op, sample)
    args = [a[row : row + 1] if i in each else a for i, a in enumerate(sample.args)]
    return Sample(args=tuple(args), quant=sample.quant)


@pytest.mark.parametrize("op", sorted(ROW_ARGUMENTS))
def test_a_row_alone_equals_the_row_in_a_batch(op: str, team: native.Team) -> None:
    for case in conformance.cases(all_ops()[op]):
        rows, _ = rows_of(case.op, case.sample)
        if not case.tactic.batch_invariant or rows == 1:
            continue
        together, _, _ = conformance.run_native(case.op, case.tactic, case.sample, team, case.level)
        for row in {0, rows // 2, rows - 1}:
            alone, _, _ = conformance.run_native(
                case.op, case.tactic, cut(case.op, case.sample, row), team, case.level
            )
            for a, b in zip(alone, together, strict=True):
                same = torch.equal(a[0].view(torch.int32), b[row].view(torch.int32))  # NaN is NaN
                assert same, f"{case}: row {row} of {rows} depends on the others"


def attention_cases(sample: Sample) -> Iterator[conformance.Case]:
    op = all_ops()["paged_attention"]
    for tactic in native_tactics("paged_attention"):
        for level in native.kernel_levels()[tactic.name]:
            yield conformance.Case(op, sample, tactic, level)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_sequence_alone_equals_the_sequence_in_a_batch(dtype: torch.dtype, team: native.Team) -> None:
    g = torch.Generator().manual_seed(1)
    lens = [(1, 700), (80, 150), (1, 3), (2, 400), (1, 129)]
    sample = paged_attention.make_sample(g, lens=lens, heads=(6, 2), block_size=16, dtype=dtype, sinks=True)
    q, k, v, table, cu, seq_lens, *rest = sample.args
    for case in attention_cases(sample):
        (together,), _, _ = conformance.run_native(case.op, case.tactic, sample, team, case.level)
        for b in range(len(lens)):
            rows = slice(int(cu[b]), int(cu[b + 1]))
            alone = (q[rows], k, v, table[b : b + 1], torch.tensor([0, lens[b][0]], dtype=torch.int32))
            args = (*alone, seq_lens[b : b + 1], *rest)
            (out,), _, _ = conformance.run_native(case.op, case.tactic, Sample(args=args), team, case.level)
            assert torch.equal(out, together[rows]), f"{case}: sequence {b}"


def test_the_number_of_threads_does_not_change_attention() -> None:
    g = torch.Generator().manual_seed(2)
    sample = paged_attention.make_sample(g, lens=[(1, 900), (33, 90)], heads=(4, 2), dim=80, block_size=16)
    for case in attention_cases(sample):
        results = []
        for threads in (1, 2, 3, 7):
            with native.Team(threads) as team:
                results += conformance.run_native(case.op, case.tactic, sample, team, case.level)[0]
        for other in results[1:]:
            assert torch.equal(results[0], other), str(case)


@st.composite
def attention_shapes(draw: st.DrawFn) -> dict[str, object]:
    lens = []
    for _ in range(draw(st.integers(1, 4))):
        queries = draw(st.sampled_from([0, 1, 1, 2, 5, 17, 73]))
        lens.append((queries, queries + draw(st.sampled_from([0, 1, 15, 16, 63, 64, 65, 127, 128, 200]))))
    if sum(q for q, _ in lens) == 0:
        lens.append((1, 7))
    lens = [(q, max(keys, 1)) for q, keys in lens]
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    return {
        "lens": lens,
        "heads": (kv_heads * draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8])), kv_heads),
        "dim": draw(st.sampled_from([8, 20, 33, 64, 80, 96, 128, 256])),
        "block_size": draw(st.sampled_from([1, 3, 4, 16, 32])),
        "window": draw(st.sampled_from([0, 0, 1, 7, 64, 100])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 3.0])),
        "dtype": draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
        "sinks": draw(st.booleans()),
    }


@given(shapes=attention_shapes(), seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_attention_of_awkward_sizes(shapes: dict[str, object], seed: int) -> None:
    sample = paged_attention.make_sample(torch.Generator().manual_seed(seed), **shapes)
    with native.Team(2) as team:
        for case in attention_cases(sample):
            conformance.check(case, team)
