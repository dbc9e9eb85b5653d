"""CUDA tactics without a GPU: right in Triton's interpreter, and compiled to machine code.

On a GPU they run by ``tests/gpu``. Each in a process of its own: a kernel is either interpreted or compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

INTERPRET = """
from pelton.ir.op import all_ops
from pelton.kernels import conformance_cuda
from pelton.kernels.tactic import all_tactics

checked = set()
for op in all_ops().values():
    for case in conformance_cuda.cases(op, ("float32", "float16")):
        # cuBLASLt needs a GPU; a long prefill takes the interpreter many seconds.
        if case.tactic.name.endswith("cublaslt") or case.sample.args[0].shape[0] > 100:
            continue
        conformance_cuda.check(case)
        checked.add(case.tactic.name)
print(len(checked), "checked")
missing = {t.name for t in all_tactics().values() if t.device == "cuda" and t.launches and not t.sm} - checked
assert all(name.endswith("cublaslt") for name in missing), missing
"""

SPLIT = """
import torch
from pelton.ir.op import get_op
from pelton.kernels import conformance_cuda as c
from pelton.kernels.launch import COUNTERS, CallSpec, OperandSpec
from pelton.kernels.linear.cuda import SkinnyTiles, skinny

torch.manual_seed(0)
for tokens, n, k, split in ((3, 80, 200, 2), (17, 33, 512, 4), (9, 64, 96, 3)):
    x, w, b = torch.randn(tokens, k), torch.randn(n, k), torch.randn(n)
    out = torch.full((tokens, n), float("nan"))
    workspace = torch.full((COUNTERS + 10 * split * n * 64,), float("nan"))
    workspace[:COUNTERS] = 0
    spec = lambda t: OperandSpec(dtype="float32", shape=tuple(t.shape), strides=t.stride())
    call = CallSpec(inputs=tuple(spec(t) for t in (x, w, b)), outputs=(spec(out),))
    launch = skinny(call, SkinnyTiles(16, 32, 32, split, 2, 4))
    c.run(launch, [x, w, b], [out], workspace, {})
    torch.testing.assert_close(out, x @ w.T + b, rtol=1e-4, atol=1e-4)
    assert not workspace[:COUNTERS].any()
print("right")
"""

COMPILE = """
from pelton.builder.cubins import compile_kernel
from pelton.kernels.launch import CallSpec, OperandSpec
from pelton.kernels.tactic import all_tactics

def operand(*shape, dtype="bfloat16"):
    return OperandSpec(dtype=dtype, shape=shape, strides=tuple(64 for _ in shape[1:]) + (1,))

inputs = operand("T", 64), operand(64, dtype="float32")
call = CallSpec(inputs=inputs, outputs=(operand("T", 64),), attrs={"eps": 1e-5})
(launch,) = all_tactics()["cuda.rms_norm"].launches(call, 16)
for sm in (80, 90):
    cubin = compile_kernel(launch.kernel, sm)
    assert cubin.image[:4] == b"\\x7fELF"
    print(cubin.name, cubin.threads)
"""


def run(program: str, tmp_path: Path, **environment: str) -> str:
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "ignore", **environment}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_tactic_computes_what_its_reference_does(tmp_path: Path) -> None:
    assert "checked" in run(INTERPRET, tmp_path, TRITON_INTERPRET="1")


def test_programs_that_share_a_tile_add_up(tmp_path: Path) -> None:
    assert "right" in run(SPLIT, tmp_path, TRITON_INTERPRET="1")


def test_kernels_are_compiled_without_a_gpu(tmp_path: Path) -> None:
    assert run(COMPILE, tmp_path, TRITON_INTERPRET="0").count("rms_norm") == 2
