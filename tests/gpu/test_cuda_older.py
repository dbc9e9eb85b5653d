"""Builds for sm_80 and sm_89, executed on a later GPU: their PTX, compiled by the driver (``ptx.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pelton.builder.build import build
from pelton.builder.cuda_conformance import DeviceRunner, compile_cases
from pelton.engine.artifact import open_engine
from pelton.engine.config import BuildConfig
from pelton.engine.session import Session
from pelton.ir.op import all_ops
from pelton.kernels import conformance_cuda
from pelton.kernels.conformance import ConformanceError
from pelton.kernels.tactic import all_tactics
from tests.builder.random_checkpoint import RandomCheckpoint
from tests.e2e.stepper import Stepper, relative_error
from tests.gpu.conftest import WIDE, Compiling
from tests.gpu.ptx import a_gpu_of
from tests.gpu.test_cuda_engine import BOUND, prompts

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

EACH = ("cuda.linear.packed16", "cuda.linear.packed64", "cuda.linear.unpack_cublaslt")
#: The second is of tactics that take no other.
DTYPES = ("bfloat16", "float16")
#: Types of the checkpoints' matrices.
ENGINES = ("bfloat16", "int4_g128", "int8_row", "q4_0")


def middling(sm: int) -> list[conformance_cuda.Case]:
    """One case of middling size of each tactic and kind of step, of those in ``EACH`` for each type of weight
    (the driver takes a tenth of a second and more for a kernel). For sm_89 those with fp8, which sm_80 lacks.
    """
    groups: dict[tuple[object, ...], list[conformance_cuda.Case]] = {}
    for op in all_ops().values():
        older = {str(case) for case in conformance_cuda.cases(op, DTYPES, sm=80)} if sm > 80 else ()
        for case in conformance_cuda.cases(op, DTYPES, sm=sm):
            own = "float16" if case.tactic.sums == "float16" else "bfloat16"
            if str(case) not in older and case.dtype == own:
                types = [w.quant for w in case.packed.values() if case.tactic.name in EACH]
                groups.setdefault((case.tactic.name, case.decode, *types), []).append(case)
    for group in groups.values():
        group.sort(key=lambda c: sum(a.numel() for a in c.sample.args if isinstance(a, torch.Tensor)))
    return [group[len(group) // 2] for group in groups.values()]


@pytest.fixture(scope="module", params=[80, 89])
def older(
    request: pytest.FixtureRequest, compiling: Compiling, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[int, DeviceRunner, list[conformance_cuda.Case]]]:
    """Runs cases by what was compiled for the older architecture."""
    compiling.wait()  # it asks the GPU what it is
    cases, folder = middling(request.param), tmp_path_factory.mktemp("older") / "all"
    with a_gpu_of(request.param):
        failed = compile_cases(cases, request.param, folder)
    assert not failed
    with DeviceRunner(folder) as runner:
        yield request.param, runner, cases


def test_every_tactic_computes_what_its_reference_does(
    older: tuple[int, DeviceRunner, list[conformance_cuda.Case]],
) -> None:
    sm, runner, cases = older
    wrong = []
    for case in cases:
        try:
            conformance_cuda.check(case, runner)
        except ConformanceError as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)
    if sm == 80:
        anywhere = {t.name for t in all_tactics().values() if t.device == "cuda" and t.launches and not t.sm}
        assert {case.tactic.name for case in cases} == anywhere


@pytest.mark.parametrize("quant", ENGINES)
def test_an_engine_computes_what_the_reference_does(quant: str, compiling: Compiling, tmp_path: Path) -> None:
    compiling.wait()
    path = tmp_path / "older.engine"
    with a_gpu_of(80):
        config = BuildConfig(target="cuda", dtype="bfloat16", max_batch_size=40)
        report = build(RandomCheckpoint(WIDE, quant=quant), config, output=path)
        assert report.quality is not None
        assert report.quality.runner == "cuda"
        engine = open_engine(path)
        assert engine.manifest.target == "sm_80"
        assert not [c for i in engine.plan.instructions for c in i.tactics if "hopper" in c.tactic]
        with Session(path, kv_blocks=400) as gpu, Session(path, kv_blocks=400, runner="reference") as host:
            a, b = Stepper(gpu), Stepper(host)
            steps = (prompts(5), {0: [3], 2: [4], 3: [5]}, {0: [6], 1: [7, 8, 9], 4: [1]})
            for new in (*steps, *({s: [11 + i] for s in range(5)} for i in range(3))):
                got, want = a.step(new), b.step(new)
                for s in new:
                    assert relative_error(got[s], want[s]) < BOUND["bfloat16"]
