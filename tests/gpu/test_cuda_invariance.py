"""Batch-invariant tactics on a GPU: a row has the same bits in steps of every size, wherever it stands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pelton.builder.cuda_conformance import DeviceRunner, compile_cases
from pelton.ir.blocks import dequantize
from pelton.ir.op import Sample, get_op
from pelton.kernels import conformance_cuda
from pelton.kernels.conformance import host_tensor, node_spec
from pelton.kernels.gpu.driver import Device
from pelton.kernels.tactic import all_tactics

pytestmark = pytest.mark.gpu

#: Of the others a part.
OPS = (
    "linear_add",
    "norm_linear",
    "norm_linear_gated",
    pytest.param("linear", marks=pytest.mark.slow),
    pytest.param("linear_gated", marks=pytest.mark.slow),
)
#: (Type of the weight, what is asked of inputs).
KINDS = (
    ("bfloat16", "bfloat16"),
    ("fp8_row", "fp8"),
    ("int4_g128", "bfloat16"),
    pytest.param("fp8_row", "bfloat16", marks=pytest.mark.slow),
    pytest.param("int8_row", "bfloat16", marks=pytest.mark.slow),
    pytest.param("int8_row", "int8", marks=pytest.mark.slow),
    pytest.param("int8_g64", "bfloat16", marks=pytest.mark.slow),
    pytest.param("nvfp4", "bfloat16", marks=pytest.mark.slow),
)
#: Tokens of steps, the largest first; results and columns: halved without a gate, and not with one.
STEPS, N, K = (1100, 512, 130, 64, 33, 8, 1), 2304, 1024
#: How far a step's rows are moved on among the rows of the largest.
MOVED = 29


def sample(op: str, quant: str, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Sample:
    g = torch.Generator().manual_seed(1)
    bias = torch.randn(weight.shape[0], generator=g)
    norm = torch.rand(x.shape[1], generator=g) + 0.5
    args: tuple[object, ...] = (x, weight, bias)
    args += ("silu",) if "gated" in op else ()
    args += (norm, 1e-5) if "norm" in op else (residual,) if "add" in op else ()
    return Sample(args=args, name=f"{quant} {x.shape[0]}", quant={} if quant == "bfloat16" else {1: quant})


def cases(op: str, quant: str, activations: str, sm: int) -> Iterator[tuple[conformance_cuda.Case, slice]]:
    """What a deterministic engine runs for each step, and where its rows stand in the largest."""
    g = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(STEPS[0], size, generator=g).bfloat16() for size in (K, N))
    weight = torch.randn(2 * N if "gated" in op else N, K, generator=g) * K**-0.5
    if quant == "bfloat16":
        weight, packed = weight.bfloat16(), {}
    else:
        packed = {1: host_tensor(weight, quant)}
        weight = torch.from_numpy(dequantize(packed[1]))
    known = [t for t in all_tactics().values() if t.op == op and t.device == "cuda" and t.sm in (0, sm)]
    for tokens in STEPS:
        where = slice(MOVED, MOVED + tokens) if tokens < STEPS[0] - MOVED else slice(None)
        own = sample(op, quant, x[where].contiguous(), residual[where].contiguous(), weight)
        spec = node_spec(get_op(op), own, activations)
        fitting = [t for t in known if t.batch_invariant and t.takes(tokens) and t.supports(spec)]
        tactic = min(fitting, key=lambda t: t.order)
        yield conformance_cuda.Case(get_op(op), own, tactic, "bfloat16", packed), where


Steps = tuple[DeviceRunner, dict[tuple[str, str, str], list[tuple[conformance_cuda.Case, slice]]]]


@pytest.fixture(scope="module")
def steps(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steps]:
    """Compiled for the tests that were chosen."""
    sm = Device().sm
    items = [i for i in request.session.items if isinstance(i, pytest.Function) and "steps" in i.fixturenames]
    chosen = [item.callspec.params for item in items]
    wanted = [(str(p["op"]), str(p["quant"]), str(p["activations"])) for p in chosen]
    found = {(op, quant, codes): list(cases(op, quant, codes, sm)) for op, quant, codes in wanted}
    folder: Path = tmp_path_factory.mktemp("invariance") / "all"
    failed = compile_cases([case for own in found.values() for case, _ in own], sm, folder)
    assert not failed
    with DeviceRunner(folder) as runner:
        yield runner, found


@pytest.mark.parametrize(("quant", "activations"), KINDS)
@pytest.mark.parametrize("op", OPS)
def test_a_row_has_the_same_bits_in_every_step(steps: Steps, op: str, quant: str, activations: str) -> None:
    runner, found = steps
    whole = torch.empty(0)
    for case, where in found[op, quant, activations]:
        (result,) = runner(case, conformance_cuda.call_of(case)).outputs
        if not len(whole):
            whole = result
            conformance_cuda.check(case, runner)
        assert torch.isfinite(result).all()
        assert torch.equal(result.view(torch.int16), whole[where].view(torch.int16)), str(case)
