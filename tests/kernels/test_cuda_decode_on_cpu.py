"""The kernel of clusters (``hopper_decode.cu``) run on a CPU, its PTX emulated (``cuda_on_cpu.h``)."""

from __future__ import annotations

import ctypes as C
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pelton.ir.op import get_op  # noqa: E402
from pelton.ir.ops import rope_paged_attention  # noqa: E402
from pelton.kernels import conformance_cuda as conformance  # noqa: E402
from pelton.kernels.conformance import compare  # noqa: E402
from pelton.kernels.launch import CudaSource, LaunchSpec  # noqa: E402
from pelton.kernels.rope_paged_attention import hopper  # noqa: E402
from pelton.kernels.tactic import all_tactics  # noqa: E402

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++")

SOURCE = Path(hopper.__file__).parent / "hopper_decode.cu"
RUN = """
extern "C" int run(int sequences, %s) {
    for (int b = 0; b < sequences; ++b)
        for (int head = 0; head < KV_HEADS; ++head)
            if (!cpu::run(CLUSTER, THREADS, SHARED, head, b, [&] { decode(%s); })) return 1;
    return 0;
}
"""


def translated() -> str:
    """The kernel's source as C++: functions of one PTX instruction are those of ``cuda_on_cpu.h``."""
    text = SOURCE.read_text().replace('#include "hopper.cuh"', '#include "cuda_on_cpu.h"')
    function = re.compile(
        r"(?:template <[^>]*>\n)?DEVICE \w+ (\w+)\([^{;]*\) \{.*?(?:^\}\n|\}\n(?=\n|#))", re.S | re.M
    )
    text = function.sub(lambda m: "" if "asm" in m[0] else m[0], text)
    signature = re.search(r"\bdecode\((const u16\*.*?)\) \{", text, re.S)
    assert signature
    text = re.sub(r'extern "C" __global__.*?(?=\bdecode\()', "void ", text, flags=re.S)
    text = re.sub(r"extern __shared__.*?memory\[\];", "unsigned char* memory = shared_memory();", text)
    text = re.sub(r'asm volatile\("griddepcontrol[^;]*;"\);', "", text)
    assert "asm" not in text
    names = [part.split()[-1].lstrip("*") for part in signature[1].split(",")]
    return text + RUN % (signature[1], ", ".join(names))


def library(launch: LaunchSpec, folder: Path) -> Any:
    source = launch.kernel
    assert isinstance(source, CudaSource)
    (folder / "decode.cpp").write_text(translated())
    macros = [f"-D{name}={value}" for name, value in (*source.constants, ("SHARED", source.shared))]
    include = f"-I{Path(__file__).parent}"
    command = [
        "g++",
        "-std=c++20",
        "-O1",
        "-w",
        "-shared",
        "-fPIC",
        "-fno-gnu-unique",  # libraries of one process would share their inline variables
        include,
        *macros,
        "decode.cpp",
        "-o",
        "x.so",
    ]
    subprocess.run(command, cwd=folder, check=True)
    return C.CDLL(str(folder / "x.so"))


@pytest.mark.parametrize(
    ("how", "shape"),
    [
        (hopper.Cluster(2, 3), {"lens": [(1, 1), (1, 17), (1, 40), (1, 300)], "cached": 2, "heads": (8, 2)}),
        (hopper.Cluster(8, 2), {"lens": [(1, 64), (1, 513)], "heads": (4, 1)}),
        (hopper.Cluster(1, 4), {"lens": [(1, 150), (1, 16)], "heads": (16, 1), "normed": True}),
        (
            hopper.Cluster(4, 3),
            {"lens": [(1, 210), (1, 7), (1, 41)], "dim": 64, "rotary": 32, "block_size": 8, "heads": (6, 2)}
            | {"window": 40, "softcap": 5.0},
        ),
        (hopper.Cluster(2, 2), {"lens": [(1, 65), (1, 64)], "window": 1, "block_size": 32, "heads": (9, 1)}),
    ],
    ids=["ragged", "eight blocks", "norms", "window", "window of one"],
)
def test_clusters_compute_what_the_reference_does(
    how: hopper.Cluster, shape: dict[str, Any], tmp_path: Path
) -> None:
    op, tactic = get_op("rope_paged_attention"), all_tactics()["cuda.rope_paged_attention.hopper.1"]
    wanted = {"dim": 128, "block_size": 16} | shape
    sample = rope_paged_attention.make_sample(torch.Generator().manual_seed(0), **wanted)
    sample = conformance._cast(op, sample, "bfloat16", "")
    call = conformance.call_of(conformance.Case(op, sample, tactic, "bfloat16", decode=True))
    (launch,) = hopper.decode(call.spec, how)
    assert isinstance(launch, LaunchSpec)
    inputs = [
        None if t is None else conformance.flat_copy(t).as_strided(t.shape, t.stride()) for t in call.inputs
    ]
    out = torch.full_like(call.outputs[0], float("nan"))
    arguments: list[Any] = []
    for argument in launch.arguments:
        if argument.kind == "float":
            arguments.append(C.c_float(argument.value))
        else:
            tensor = inputs[argument.index] if argument.kind == "input" else out
            assert tensor is not None
            arguments.append(C.c_void_p(tensor.data_ptr()))
    assert library(launch, tmp_path).run(len(wanted["lens"]), *arguments) == 0, "threads wait for ever"
    compare(out, call.outputs[0], 1e-2, "result")
    for index in (4, 5):
        got = inputs[index]
        assert got is not None
        assert torch.equal(got.view(torch.int16), call.wanted[index].view(torch.int16)), "caches differ"
