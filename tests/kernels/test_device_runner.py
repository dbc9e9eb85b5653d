"""What runs conformance cases on a GPU, on one that computes nothing: a launcher takes cases of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from pelton.builder.cuda_conformance import DeviceRunner, compile_cases
from pelton.ir.op import get_op
from pelton.kernels import conformance_cuda
from pelton.kernels.gpu.null import null_gpu

pytest.importorskip("triton")


def test_a_launcher_takes_cases_of_every_kind(tmp_path: Path) -> None:
    wanted = (("take_rows", False), ("rope_paged_attention", True))
    cases = [
        next(c for c in conformance_cuda.cases(get_op(op), ("float32",), sm=90) if c.decode == decode)
        for op, decode in wanted
    ]
    assert not compile_cases(cases, 90, tmp_path / "kernels")
    with null_gpu() as gpu, DeviceRunner(tmp_path / "kernels") as runner:
        for case in cases:
            before = gpu.launches
            result = runner(case, conformance_cuda.call_of(case))
            assert gpu.launches > before, f"{case} launches nothing"
            assert result.within
