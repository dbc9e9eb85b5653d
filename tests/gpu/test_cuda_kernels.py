"""CUDA tactics against their ops' references, on a GPU."""

from __future__ import annotations

import functools

import pytest
from _pytest.mark import ParameterSet

from pelton.builder.cuda_conformance import DeviceRunner
from pelton.ir.op import get_op
from pelton.kernels import conformance_cuda, telling_cases
from pelton.kernels.tactic import all_tactics
from tests.gpu.conftest import DTYPES, EVERY, FEW, TELLING

pytestmark = pytest.mark.gpu
TACTICS = sorted((t.name, t.sums) for t in all_tactics().values() if t.device == "cuda")
_EACH = [p if isinstance(p, ParameterSet) else pytest.param(p) for p in DTYPES]
#: What adds in float16 takes no other type.
PAIRS = [
    pytest.param(name, *p.values, marks=p.marks)
    for name, sums in TACTICS
    for p in ([pytest.param("float16")] if sums == "float16" else _EACH)
]


@functools.cache
def cases_of(op: str, dtype: str, sm: int) -> list[conformance_cuda.Case]:
    """Of all tactics of an op."""
    return list(conformance_cuda.cases(get_op(op), (dtype,), sm=sm))


@pytest.mark.parametrize("samples", [TELLING, pytest.param(EVERY, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_a_tactic_computes_what_its_reference_does(
    kernels: DeviceRunner, name: str, dtype: str, samples: str
) -> None:
    every = cases_of(all_tactics()[name].op, dtype, kernels.device.sm)
    cases = [case for case in every if case.tactic.name == name]
    if not cases:
        pytest.skip("the tactic takes no sample of this type here")
    for case in telling_cases.telling(cases, FEW) if samples == TELLING else cases:
        conformance_cuda.check(case, kernels)
