"""Triton tactics: right in Triton's interpreter, compiled for a GPU that need not be there."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kernels.interpreter import skip_where_the_interpreter_fails
from tests.page_package import install, python

pytest.importorskip("triton")

CHECK = """
from dataclasses import replace

import torch
from pelton.ir.op import Sample, get_op
from pelton.kernels import conformance_cuda
from pelton.kernels.conformance import ConformanceError, node_spec
from pelton.kernels.launch import CallSpec, OperandSpec, Term
from pelton.kernels.tactic import all_tactics
import my_swish.triton_ops

op = get_op("my::swish_norm")
tactic = all_tactics()["my_swish.triton_ops:swish_norm_triton"]
assert (tactic.device, tactic.kind) == ("cuda", "triton")
"""

INTERPRET = """
wide = torch.randn(4, 200)
for x in (torch.randn(5, 33), wide[:, 60:124], torch.randn(1, 576)):
    sample = Sample(args=(x, 1.5))
    assert tactic.supports(node_spec(op, sample))
    print("error", conformance_cuda.check(conformance_cuda.Case(op, sample, tactic, "float32")))
assert not tactic.supports(node_spec(op, Sample(args=(wide[0], 1.5))))
my_swish.triton_ops.swish_norm_kernel.fn.__globals__["tl"].sqrt = lambda x: x
try:
    conformance_cuda.check(conformance_cuda.Case(op, sample, tactic, "float32"))
except ConformanceError as error:
    print("found", error)
"""

COMPILE = """
from pelton.builder.cubins import compile_kernel

x = OperandSpec(dtype="bfloat16", shape=("T", 33), strides=(40, 1))
out = OperandSpec(dtype="bfloat16", shape=("T", 33), strides=(33, 1))
call = CallSpec(inputs=(x,), outputs=(out,), attrs={"beta": 1.5})
(launch,) = tactic.launches(call, 64)
assert launch.grid == ((Term("T"),),), launch.grid
assert [a.kind for a in launch.arguments] == ["input", "output", "int", "int", "float"], launch.arguments
assert dict(launch.kernel.constants) == {"BLOCK": 64}
cubin = compile_kernel(launch.kernel, 90)
assert cubin.image[:4] == b"\\x7fELF", cubin.image[:4]
print("cubin", cubin.name, cubin.threads)
"""

GRIDS = """
import triton
import triton.language as tl
from pelton.errors import BuildError
from pelton.kernels.triton_source import launches_of

kernel = my_swish.triton_ops.swish_norm_kernel
x = OperandSpec(dtype="float32", shape=("T", 3, 8), strides=(24, 8, 1))
call = CallSpec(inputs=(x,), outputs=(x,), attrs={"beta": 1.0})

def record(launcher):
    return launches_of("mine", launcher, (("x", True), ("beta", False)))(call, 64)

def blocks(x, beta, out):
    kernel[lambda meta: (triton.cdiv(x.shape[0], 16) * 3, x.shape[1])](x, out, x.shape[0], 8, beta, BLOCK=8)

(launch,) = record(blocks)
assert launch.grid == ((Term("T", 16, 3),), (Term(times=3),)), launch.grid
assert launch.arguments[2].kind == "dim" and launch.arguments[2].dim == "T", launch.arguments

def view(x, beta, out):
    kernel[(1,)](x[:, 0], out, 1, 8, beta, BLOCK=8)

def square(x, beta, out):
    kernel[(x.shape[0] ** 2,)](x, out, 1, 8, beta, BLOCK=8)

def constant(x, beta, out):
    kernel[(1,)](x, out, 1, 8, beta, BLOCK=x.shape[0])

def product(x, beta, out):
    kernel[(1,)](x, out, 3 * x.shape[0], 8, beta, BLOCK=8)

def reads(x, beta, out):
    kernel[(int(x.sum()),)](x, out, 1, 8, beta, BLOCK=8)

def nothing(x, beta, out): ...

for launcher in (view, square, constant, product, reads, nothing):
    try:
        record(launcher)
        raise AssertionError(launcher)
    except BuildError as error:
        print(error)
"""


def run(program: str, folder: Path, **environment: str) -> str:
    package = install(folder / "site")
    cache = str(folder / "cache")
    code, out, err = python(CHECK + program, path=package, TRITON_CACHE_DIR=cache, **environment)
    assert code == 0, err
    return out


def test_the_interpreter_holds_a_tactic_to_the_reference(tmp_path: Path) -> None:
    skip_where_the_interpreter_fails()
    out = run(INTERPRET, tmp_path, TRITON_INTERPRET="1")
    errors = [float(line.split()[1]) for line in out.splitlines() if line.startswith("error")]
    assert len(errors) == 3
    assert max(errors) < 1e-5
    assert "found" in out


def test_a_kernel_is_compiled_without_a_gpu(tmp_path: Path) -> None:
    assert run(COMPILE, tmp_path).startswith("cubin swish_norm_kernel 128")


def test_grids_and_numbers_follow_the_tokens_or_are_refused(tmp_path: Path) -> None:
    lines = run(GRIDS, tmp_path).splitlines()
    for line, message in zip(
        lines,
        (
            "passes as x_ptr a tensor that is no argument",
            "has a grid of",
            "makes the constant BLOCK depend on the number of tokens",
            "passes as row_stride a number computed from the number of tokens",
            "fails on tensors without values",
            "launches no kernel",
        ),
        strict=True,
    ):
        assert line.startswith("the Triton tactic mine") and message in line, line
