"""CUDA tactics without a GPU: right in Triton's interpreter, and compiled to machine code.

On a GPU they run by ``tests/gpu``. Each in a process of its own: a kernel is either interpreted or compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.kernels.interpreter import skip_where_the_interpreter_fails

from pelton.ir.op import get_op
from pelton.kernels import conformance_cuda

pytest.importorskip("triton")

INTERPRET = """
import sys
import torch
from pelton.ir.op import all_ops
from pelton.kernels import conformance_cuda
from pelton.kernels.tactic import all_tactics

checked = set()
for op in all_ops().values():
    found = {}
    for case in conformance_cuda.cases(op, ("float32", "float16")):
        # cuBLASLt needs a GPU; a long prefill takes the interpreter many seconds.
        if case.tactic.name.endswith("cublaslt") or case.sample.args[0].shape[0] > 100:
            continue
        kind = case.decode, " sinks" in case.sample.name
        found.setdefault((case.tactic.name, case.dtype, *kind), []).append(case)
    names = list(dict.fromkeys(name for name, *_ in found))
    for (name, dtype, *more), cases in found.items():
        checked.add(name)
        # A kernel's sizes follow each other: where all are not asked for, they take turns in the types.
        turn = ("float16", "float32")[names.index(name) % 2]
        if sys.argv[1] == "1" and dtype != turn and (name, turn, *more) in found:
            continue
        cases.sort(key=lambda c: sum(a.numel() for a in c.sample.args if isinstance(a, torch.Tensor)))
        for case in cases[: int(sys.argv[1])]:
            conformance_cuda.check(case)
print(len(checked), "checked")
missing = {t.name for t in all_tactics().values() if t.device == "cuda" and t.launches and not t.sm} - checked
assert all(name.endswith("cublaslt") for name in missing), missing
"""

SHARED = """
import torch
from pelton.kernels.linear.triton_stream import stream

torch.manual_seed(0)
# Runs of tiles that begin and end within a tile, meet a tile with others, or hold several.
for tokens, n, k, programs, kind in (
    (3, 80, 192, 4, ""), (17, 100, 200, 7, ""), (9, 48, 256, 5, "silu"), (4, 64, 640, 5, "silu"),
    (2, 32, 640, 9, ""),
):
    x, w = torch.randn(tokens, k), torch.randn(n * (2 if kind else 1), k) * k**-0.5
    residual = torch.randn(tokens, n)
    out = torch.full((tokens, n), float("nan"))
    m_tiles = -(-tokens // 16)
    partial = torch.full((m_tiles * 2 * programs * 2 * 32 * 16,), float("nan"))
    counters = torch.zeros(64, dtype=torch.int32)
    stream[(programs, m_tiles)](
        x, w, None, residual, out, partial, counters, tokens, N=n, K=k, X_ROW=k, R_ROW=n, KIND=kind,
        BLOCK_M=16, BLOCK_N=32, BLOCK_K=64, PROGRAMS=programs, STAGES=2, PREFETCH=0, DEPENDENT=False,
    )
    want = x @ w.T
    if kind:
        gate, up = want.chunk(2, -1)
        want = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(out, want + residual, rtol=1e-4, atol=1e-4)
    assert not counters.any()
print("right")
"""

WORDS = """
import torch
from pelton.kernels.linear.triton_gemv import gemv

torch.manual_seed(0)
for n, k, programs, kind in ((80, 192, 7, ""), (33, 200, 3, "silu")):
    x, w = torch.randn(1, k).bfloat16(), (torch.randn(n * (2 if kind else 1), k) * k**-0.5).bfloat16()
    norm, residual = torch.rand(k) + 0.5, torch.randn(1, n).bfloat16()
    out = torch.full((1, n), float("nan"), dtype=torch.bfloat16)
    gemv[(programs, 1)](
        x, w, None, residual, norm, out, 1e-5, N=n, K=k, X_ROW=k, R_ROW=n, KIND=kind, BLOCK_N=4, BLOCK_K=64,
        PROGRAMS=programs, STAGES=2, PREFETCH=0, DEPENDENT=False,
    )
    v = torch.nn.functional.rms_norm(x.float(), (k,), norm, 1e-5)
    want = v @ w.float().T
    if kind:
        gate, up = want.chunk(2, -1)
        want = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(out.float(), want + residual.float(), rtol=2e-2, atol=2e-2)
print("right")
"""

PADDED = """
import torch
from pelton.ir.op import get_op
from pelton.ir.ops import rope_paged_attention
from pelton.kernels import conformance_cuda as c
from pelton.kernels.tactic import all_tactics

# As a graph pads a step: sequences without keys, whose slots store nothing. Caches of another type.
op = get_op("rope_paged_attention")
g = torch.Generator().manual_seed(0)
lens = [(1, 40), (1, 1), (1, 130), (1, 1)]
tactics = [t for t in all_tactics().values() if t.op == op.name and t.decode and t.takes(len(lens))]
tactics = [t for t in tactics if not t.sm]  # of one architecture: no Triton kernels of their own
for sinks in (False, True):
    sample = rope_paged_attention.make_sample(
        g, lens=lens, heads=(8, 2), block_size=16, dtype=torch.float16, sinks=sinks
    )
    for b in (1, 3):
        sample.args[6][b] = -1
        sample.args[9][b] = 0
        sample.args[7][b] = 0
    for tactic in tactics:
        c.check(c.Case(op, sample, tactic, "float16", decode=True))
print(len(tactics), "right")
"""

CODES = """
import torch
from pelton.kernels import conformance_cuda as c
from pelton.kernels.tactic import all_tactics
from tests.kernels import key_codes

for op, tactic, sequences in (
    ("kv_write", "kv_write", 8), ("rope_kv_write", "rope_kv_write", 8),
    ("rope_paged_attention", "rope_paged_attention.any", 2),
):
    sample = key_codes.sample_of(op, torch.float8_e4m3fn, dim=80, sequences=sequences)
    case = key_codes.case_of(op, all_tactics()["cuda." + tactic], sample, "float32")
    call = c.call_of(case)
    cache = c.interpret(case, call).inputs[next(iter(call.wanted))]
    print(op, key_codes.check_codes(case.op, case.sample, cache), "differ")
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


def run(program: str, tmp_path: Path, *arguments: str, **environment: str) -> str:
    if environment.get("TRITON_INTERPRET") == "1":
        skip_where_the_interpreter_fails()
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "ignore", **environment}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


#: Samples of each tactic and type, the smallest first: the interpreter is slow, and there are many tactics.
FEW, ALL = "1", "1000"


@pytest.mark.parametrize("samples", [FEW, pytest.param(ALL, marks=pytest.mark.slow)])
@pytest.mark.timeout(1800)
def test_every_tactic_computes_what_its_reference_does(samples: str, tmp_path: Path) -> None:
    assert "checked" in run(INTERPRET, tmp_path, samples, TRITON_INTERPRET="1")


def test_programs_that_share_a_tile_add_up(tmp_path: Path) -> None:
    assert "right" in run(SHARED, tmp_path, TRITON_INTERPRET="1")


def test_a_row_of_bfloat16_is_read_in_words(tmp_path: Path) -> None:
    assert "right" in run(WORDS, tmp_path, TRITON_INTERPRET="1")


def test_sequences_that_pad_a_decode_step_attend_to_nothing(tmp_path: Path) -> None:
    assert int(run(PADDED, tmp_path, TRITON_INTERPRET="1").split()[0]) > 0


def test_keys_get_the_reference_s_codes_but_for_ties(tmp_path: Path) -> None:
    out = run(CODES, tmp_path, TRITON_INTERPRET="1", PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    assert out.count("differ") == 3


def test_kernels_are_compiled_without_a_gpu(tmp_path: Path) -> None:
    assert run(COMPILE, tmp_path, TRITON_INTERPRET="0").count("rms_norm") == 2


def test_every_kernel_that_writes_keys_takes_shifts() -> None:
    for op in ("kv_write", "rope_kv_write", "rope_paged_attention"):
        first = [p.name for p in get_op(op).torch_op._schema.arguments].index("k_shift")
        taken: dict[bool, set[str]] = {False: set(), True: set()}
        for case in conformance_cuda.cases(get_op(op), ("bfloat16",), sm=90):
            if any(getattr(a, "dtype", None) == torch.float8_e4m3fn for a in case.sample.args):
                shifted = any(a is not None for a in case.sample.args[first : first + 2])
                taken[shifted].add(case.tactic.name)
        assert taken[True]
        # A step of one token is not among the samples.
        assert {name for name in taken[False] if not name.endswith(".1")} == taken[True]
