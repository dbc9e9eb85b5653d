"""The kernel of clusters (``hopper_decode.cu``) run on a CPU, its PTX emulated (``cuda_on_cpu.h``)."""

from __future__ import annotations

import ctypes as C
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.kernels import key_codes  # noqa: E402
from tests.kernels.cuda_on_cpu import library  # noqa: E402

from pelton.ir.ops import rope_paged_attention  # noqa: E402
from pelton.kernels import conformance_cuda as conformance  # noqa: E402
from pelton.kernels.conformance import compare  # noqa: E402
from pelton.kernels.launch import LaunchSpec  # noqa: E402
from pelton.kernels.rope_paged_attention import hopper  # noqa: E402
from pelton.kernels.tactic import all_tactics  # noqa: E402

TACTIC = all_tactics()["cuda.rope_paged_attention.hopper.1"]
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++")

RUN = """
extern "C" int run(int sequences, SIGNATURE) {
    for (int b = 0; b < sequences; ++b)
        for (int head = 0; head < KV_HEADS; ++head)
            if (!cpu::run(CLUSTER, LAUNCHED, SHARED, head, b, [&] { CALL; })) return 1;
    return 0;
}
"""


@pytest.mark.parametrize(
    ("how", "shape"),
    [
        (hopper.Cluster(2, 3), {"lens": [(1, 1), (1, 17), (1, 40), (1, 300)], "cached": 2, "heads": (8, 2)}),
        (hopper.Cluster(8, 2), {"lens": [(1, 64), (1, 513)], "heads": (4, 1), "sinks": True}),
        (
            hopper.Cluster(1, 4),
            {"lens": [(1, 150), (1, 16)], "heads": (16, 1), "normed": True, "y_codes": "fp8", "sinks": True},
        ),
        (
            hopper.Cluster(4, 3),
            {"lens": [(1, 210), (1, 7), (1, 41)], "dim": 64, "rotary": 32, "block_size": 8, "heads": (6, 2)}
            | {"window": 40, "softcap": 5.0},
        ),
        (hopper.Cluster(2, 2), {"lens": [(1, 65), (1, 64)], "window": 1, "block_size": 32, "heads": (9, 1)}),
        (
            hopper.Cluster(2, 3),
            {"lens": [(1, 1), (1, 33), (1, 300)], "cached": 2, "heads": (8, 2), "dtype": torch.int8}
            | {"y_codes": "int8"},
        ),
        (
            hopper.Cluster(8, 2),
            {"lens": [(1, 70), (1, 523)], "dim": 64, "rotary": 32, "heads": (5, 1), "normed": True}
            | {"dtype": torch.float8_e4m3fn},
        ),
        (
            hopper.Cluster(1, 3),
            {"lens": [(1, 210), (1, 41)], "block_size": 8, "heads": (12, 1), "window": 40, "softcap": 5.0}
            | {"dtype": torch.float8_e4m3fn, "sinks": True},
        ),
        (
            hopper.Cluster(2, 3),
            {"lens": [(1, 1), (1, 33), (1, 97), (1, 64)], "cached": 2, "heads": (8, 2), "shifted": True}
            | {"dtype": torch.float8_e4m3fn},
        ),
        (
            hopper.Cluster(4, 2),
            {"lens": [(1, 70), (1, 41), (1, 9)], "dim": 64, "rotary": 32, "heads": (5, 1), "normed": True}
            | {"dtype": torch.float8_e4m3fn, "shifted": True},
        ),
        (
            hopper.Cluster(1, 3),
            {"lens": [(1, 50), (1, 33)], "dim": 64, "heads": (4, 4), "dtype": torch.int8, "shifted": True},
        ),
    ],
    ids=["ragged", "sinks", "norms, sinks", "window", "window of one", "int8", "fp8", "fp8, window, sinks"]
    + ["fp8 shifted", "fp8 of 64, shifted", "int8 shifted"],
)
def test_clusters_compute_what_the_reference_does(
    how: hopper.Cluster, shape: dict[str, Any], tmp_path: Path
) -> None:
    wanted = {"dim": 128, "block_size": 16} | shape
    sample = rope_paged_attention.make_sample(torch.Generator().manual_seed(0), **wanted)
    case = key_codes.case_of("rope_paged_attention", TACTIC, sample, "bfloat16")
    call, inputs, out = emulated(case, how, tmp_path)
    tolerance = case.op.tolerance[wanted.get("y_codes", "bfloat16")]
    compare(out, call.outputs[0], tolerance, "result")
    for index in (4, 5):
        got = inputs[index]
        assert got is not None
        assert torch.equal(got.view(torch.uint8), call.wanted[index].view(torch.uint8)), "caches differ"


@pytest.mark.parametrize("dim", [64, 128])
def test_keys_get_the_reference_s_codes_but_for_ties(dim: int, tmp_path: Path) -> None:
    sample = key_codes.sample_of("rope_paged_attention", torch.float8_e4m3fn, dim=dim, sequences=24)
    case = key_codes.case_of("rope_paged_attention", TACTIC, sample, "bfloat16")
    _, inputs, _ = emulated(case, hopper.Cluster(1, 2), tmp_path)
    cache = inputs[4]
    assert cache is not None
    key_codes.check_codes(case.op, case.sample, cache)


def emulated(
    case: conformance.Case, how: hopper.Cluster, folder: Path
) -> tuple[conformance.CaseCall, list[torch.Tensor | None], torch.Tensor]:
    """The case's call, and its inputs and its result after the kernel."""
    call = conformance.call_of(case)
    (launch,) = hopper.decode(call.spec, how)
    assert isinstance(launch, LaunchSpec)
    inputs = [
        None if t is None else conformance.flat_copy(t).as_strided(t.shape, t.stride()) for t in call.inputs
    ]
    want = call.outputs[0]
    out = torch.full((*want.shape, want.itemsize), 0xFF, dtype=torch.uint8).view(want.dtype).squeeze(-1)
    arguments: list[Any] = []
    for argument in launch.arguments:
        if argument.kind == "float":
            arguments.append(C.c_float(argument.value))
        else:
            tensor = inputs[argument.index] if argument.kind == "input" else out
            assert tensor is not None
            arguments.append(C.c_void_p(tensor.data_ptr()))
    assert library(launch, RUN, folder).run(len(out), *arguments) == 0, "threads wait for ever"
    return call, inputs, out
