"""CUDA tactics against their ops' references, on a GPU."""

from __future__ import annotations

import pytest

from pelton.builder.cuda_conformance import DeviceRunner
from pelton.ir.op import get_op
from pelton.kernels import conformance_cuda
from pelton.kernels.tactic import all_tactics
from tests.gpu.conftest import DTYPES

pytestmark = pytest.mark.gpu
TACTICS = sorted(t.name for t in all_tactics().values() if t.device == "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TACTICS)
def test_a_tactic_computes_what_its_reference_does(kernels: DeviceRunner, name: str, dtype: str) -> None:
    op = get_op(all_tactics()[name].op)
    checked = 0
    for case in conformance_cuda.cases(op, (dtype,), sm=kernels.device.sm):
        if case.tactic.name == name:
            conformance_cuda.check(case, kernels)
            checked += 1
    if not checked:
        pytest.skip("the tactic takes no sample of this type")
