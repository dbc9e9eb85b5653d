"""Triton tactics: right in Triton's interpreter, compiled for a GPU that need not be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

CHECK = """
from dataclasses import replace

import torch
from pelton.ir.op import get_op
from pelton.kernels import triton_source
from pelton.kernels.conformance import ConformanceError, node_spec
from pelton.kernels.tactic import all_tactics
from tests.kernels import outside_triton

op = get_op("outside::swish_norm")
tactic = all_tactics()["tests.kernels.outside_triton.swish_norm_triton"]
assert (tactic.device, tactic.kind) == ("cuda", "triton")
"""

INTERPRET = """
samples = [s for s in op.samples(torch.Generator().manual_seed(0)) if tactic.supports(node_spec(op, s))]
assert len(samples) == 2
for sample in samples:
    print("error", triton_source.check(op, tactic, sample))
tactic = replace(tactic, implementation=lambda x, beta, out: out.copy_(x))
try:
    triton_source.check(op, tactic, samples[0])
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


def run(program: str, tmp_path: Path, **environment: str) -> str:
    root = Path(__file__).parents[2]
    env = {
        **os.environ,
        "PYTHONPATH": f"{root / 'src'}:{root}",
        "TRITON_CACHE_DIR": str(tmp_path),
        **environment,
    }
    done = subprocess.run(
        [sys.executable, "-c", CHECK + program], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_interpreter_holds_a_tactic_to_the_reference(tmp_path: Path) -> None:
    out = run(INTERPRET, tmp_path, TRITON_INTERPRET="1")
    errors = [float(line.split()[1]) for line in out.splitlines() if line.startswith("error")]
    assert len(errors) == 2
    assert max(errors) < 1e-5
    assert "found" in out


def test_a_kernel_is_compiled_without_a_gpu(tmp_path: Path) -> None:
    assert run(COMPILE, tmp_path).startswith("cubin swish_norm_kernel")
