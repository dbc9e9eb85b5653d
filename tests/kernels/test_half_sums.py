"""Kernels with sums in float16: where these are, in Triton's interpreter, and in what is compiled."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.kernels.test_cuda_tactics import run

pytest.importorskip("triton")

INTERPRET = """
from pelton.kernels import conformance_cuda as c
from tests.kernels import half_sums

def of_one(case):
    return set(c.interpret(case, c.call_of(case)).outputs[0].flatten().tolist())

assert of_one(half_sums.rounded("gemm")) == {3.0}
assert of_one(half_sums.rounded("half_sums")) <= {2.0, 4.0}
for case in half_sums.exact():
    c.check(case)
print("right")
"""

COMPILE = """
import re
import triton
from pelton.builder.cubins import compile_kernel
from pelton.kernels import conformance_cuda as c
from tests.kernels import half_sums

# mma.sync.aligned.m16n8k16.row.col.f16..., wgmma.mma_async.sync.aligned.m64n128k16.f16...: the result's type
PRODUCT = "mma[a-z_.]*[.]sync[.]aligned[.]m[0-9nk]+(?:[.]row[.]col)?[.]([a-z0-9]+)"
compiled, found = triton.compile, []

def listing(*arguments, **options):
    result = compiled(*arguments, **options)
    found.append(set(re.findall(PRODUCT, result.asm["ptx"])))
    return result

triton.compile = listing
for sm in (80, 89, 90):
    for case in (half_sums.rounded("gemm"), half_sums.rounded("half_sums"), half_sums.exact()[-1]):
        for work in c.call_of(case).works:
            compile_kernel(work.kernel, sm)
            print(sm, case.tactic.name, *sorted(found[-1]))
"""


def test_a_sum_of_so_many_columns_is_in_float16_and_all_others_are_not(tmp_path: Path) -> None:
    paths = os.pathsep.join(filter(None, sys.path))
    assert "right" in run(INTERPRET, tmp_path, TRITON_INTERPRET="1", PYTHONPATH=paths)


@pytest.mark.slow
def test_tensor_cores_of_every_architecture_add_in_float16(tmp_path: Path) -> None:
    out = run(COMPILE, tmp_path, TRITON_INTERPRET="0", PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    lines = [line.split() for line in out.splitlines()]
    assert len(lines) == 9
    for sm, tactic, *products in lines:
        assert products == ["f16" if tactic.endswith("half_sums") else "f32"], (sm, tactic)
