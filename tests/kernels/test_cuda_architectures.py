"""Every CUDA tactic compiles for every architecture that it is offered on, within its shared memory."""

from __future__ import annotations

import pytest

from pelton.builder.cubins import MAX_SHARED, compile_all
from pelton.errors import PeltonError
from pelton.ir.op import all_ops
from pelton.kernels import conformance_cuda
from pelton.kernels.gpu import nvrtc
from pelton.kernels.launch import CudaSource, LaunchSpec, Source

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def sources(sm: int) -> dict[Source, conformance_cuda.Case]:
    """The kernels of tactics for ``sm``, each with a case that launches it.

    All of those whose tiles go through shared memory in a pipeline; of the others one for each tactic and
    type. In float16 those that take nothing else.
    """
    found: dict[Source, conformance_cuda.Case] = {}
    seen = set()
    for op in all_ops().values():
        for case in conformance_cuda.cases(op, ("float32", "bfloat16", "float16"), sm=sm):
            if case.dtype == "float16" and case.tactic.sums == "float32":
                continue
            for work in conformance_cuda.call_of(case).works:
                if not isinstance(work, LaunchSpec):
                    continue
                kernel = work.kernel
                kind = (case.tactic.name, case.dtype, kernel.function)
                if kind in seen and "STAGES" not in dict(kernel.constants):
                    continue
                seen.add(kind)
                found.setdefault(kernel, case)
    return found


@pytest.mark.parametrize("sm", [80, 89, 90])
def test_every_tactic_compiles(sm: int) -> None:
    wanted = sources(sm)
    if not nvrtc.available():
        wanted = {source: case for source, case in wanted.items() if not isinstance(source, CudaSource)}
    failed = []
    for (source, case), cubin in zip(wanted.items(), compile_all(list(wanted), sm), strict=True):
        if isinstance(cubin, PeltonError):
            failed.append(f"{case}: {source.function}: {cubin}")
        else:
            assert cubin.shared <= MAX_SHARED.get(sm, 99 << 10)
    assert not failed, "\n".join(failed)
    assert len(wanted) > 100
