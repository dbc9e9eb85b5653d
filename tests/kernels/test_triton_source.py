"""Triton tactics: right in Triton's interpreter, compiled for a GPU that need not be there."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.page_package import install, python

pytest.importorskip("triton")

CHECK = """
from dataclasses import replace

import torch
from pelton.ir.op import Sample, get_op
from pelton.kernels import triton_source
from pelton.kernels.conformance import ConformanceError, node_spec
from pelton.kernels.tactic import all_tactics
import my_swish.triton_ops

op = get_op("my::swish_norm")
tactic = all_tactics()["my_swish.triton_ops.swish_norm_triton"]
assert (tactic.device, tactic.kind) == ("cuda", "triton")
"""

INTERPRET = """
wide = torch.randn(4, 200)
for x in (torch.randn(5, 33), wide[:, 60:124], torch.randn(1, 576)):
    sample = Sample(args=(x, 1.5))
    assert tactic.supports(node_spec(op, sample))
    print("error", triton_source.check(op, tactic, sample))
assert not tactic.supports(node_spec(op, Sample(args=(wide[0], 1.5))))
tactic = replace(tactic, implementation=lambda x, beta, out: out.copy_(x))
try:
    triton_source.check(op, tactic, sample)
except ConformanceError as error:
    print("found", error)
"""

COMPILE = """
(launch,) = triton_source.launches(op, tactic, (torch.empty(5, 33, device="meta"), 1.5))
assert launch.grid == (5,), launch.grid
assert launch.args["BLOCK"] == 64, launch.args
cubin = triton_source.compile_cubin(launch, capability=90)
assert cubin.code[:4] == b"\\x7fELF", cubin.code[:4]
print("cubin", cubin.name, cubin.num_warps)
"""


def run(program: str, folder: Path, **environment: str) -> str:
    package = install(folder / "site")
    cache = str(folder / "cache")
    code, out, err = python(CHECK + program, path=package, TRITON_CACHE_DIR=cache, **environment)
    assert code == 0, err
    return out


def test_the_interpreter_holds_a_tactic_to_the_reference(tmp_path: Path) -> None:
    out = run(INTERPRET, tmp_path, TRITON_INTERPRET="1")
    errors = [float(line.split()[1]) for line in out.splitlines() if line.startswith("error")]
    assert len(errors) == 3
    assert max(errors) < 1e-5
    assert "found" in out


def test_a_kernel_is_compiled_without_a_gpu(tmp_path: Path) -> None:
    assert run(COMPILE, tmp_path).startswith("cubin swish_norm_kernel 4")
