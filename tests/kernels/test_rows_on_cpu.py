"""Products of whole rows (``hopper_rows.cu``, ``hopper_rows8.cu``) run on a CPU, their PTX emulated."""

from __future__ import annotations

import ctypes as C
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.kernels.cuda_on_cpu import compiled  # noqa: E402

from pelton.ir import group_blocks  # noqa: E402
from pelton.ir.group_encoder import encode  # noqa: E402
from pelton.ir.op import get_op  # noqa: E402
from pelton.ir.static_codes import LARGEST, scale_of, to_codes  # noqa: E402
from pelton.kernels.conformance import compare  # noqa: E402
from pelton.kernels.launch import CallSpec, CudaSource, LaunchSpec, OperandSpec, TensorMap  # noqa: E402
from pelton.kernels.layouts import LAYOUTS  # noqa: E402
from pelton.kernels.linear import hopper, products  # noqa: E402
from pelton.kernels.linear.products import Form  # noqa: E402
from pelton.kernels.linear.tiles import HopperTiles  # noqa: E402

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++")

FOLDER = Path(hopper.__file__).parent
RUN = """
extern "C" int run(int threads, int bytes, int workers, %s) {
    for (int b = 0; b < workers; ++b)
        if (!cpu::run(1, threads, bytes, b, 0, [&] { product(%s); })) return 1;
    return 0;
}
"""
FORMS = {
    "linear": Form(),
    "linear_add": Form(residual=3),
    "norm_linear": Form(norm=3),
    "norm_linear_gated": Form(gated=True, norm=3),
}


def translated(file: str) -> str:
    """The source as C++: functions of one PTX instruction are those of ``rows_on_cpu.h``."""
    text = (FOLDER.parent / file).read_text()
    shared = (FOLDER / "hopper_rows.cuh").read_text()
    text = text.replace('#include "hopper_rows.cuh"', shared)
    for name in ("activation.cuh", "codes.cuh"):
        text = text.replace(f'#include "{name}"', (FOLDER.parent / "gpu" / name).read_text())
    text = text.replace("#pragma once", "")
    text = text.replace('#include "hopper.cuh"', '#include "rows_on_cpu.h"')
    function = re.compile(r"^DEVICE \w+ (\w+)\([^{;]*\) \{(?:[^\n]*\}\n|.*?^\}\n)", re.S | re.M)
    text = function.sub(lambda m: "" if "asm" in m[0] else m[0], text)
    text = re.sub(r'extern "C" __global__.*?(?=\bproduct\()', "void ", text, flags=re.S)
    text = re.sub(r"extern __shared__.*?memory\[\];", "unsigned char* memory = shared_memory();", text)
    # One block at a time: its number is that of the grid's second axis here.
    text = text.replace("blockIdx.x", "blockIdx.y")
    assert "asm" not in text
    signature = re.search(r"\bproduct\((const __grid_constant__.*?)\) \{", text, re.S)
    assert signature
    parameters = [part.strip() for part in signature[1].split(",")]
    taken = [p.replace("__grid_constant__ TensorMap ", "TensorMap* ") for p in parameters]
    names = [("*" if "TensorMap" in p else "") + p.split()[-1].lstrip("*") for p in taken]
    return text + RUN % (", ".join(taken), ", ".join(n if n[0] != "*" else f"*{n[1:]}" for n in names))


def library(source: CudaSource, folder: Path) -> Any:
    macros = {**dict(source.constants), "EIGHT": int(source.file == hopper.FILE_8)}
    return compiled(translated(source.file), macros, folder)


def encoded(wanted: TensorMap, address: int) -> Any:
    item = {"uint8": 1, "bfloat16": 2}[wanted.dtype]

    def padded(numbers: tuple[int, ...], count: int) -> list[int]:
        return [*numbers, *[0] * (count - len(numbers))]

    words = [address, item, len(wanted.shape), *padded(wanted.shape, 3), *padded(wanted.strides, 2)]
    words += padded(wanted.box, 3)
    return (C.c_uint64 * 16)(*words)


def operand(tensor: Any, *, dynamic: bool = False, quant: str = "") -> OperandSpec:
    shape = ("T", *tensor.shape[1:]) if dynamic else tuple(tensor.shape)
    dtype = "uint8" if quant else str(tensor.dtype).removeprefix("torch.")
    return OperandSpec(dtype=dtype, shape=shape, strides=tuple(tensor.stride()), quant=quant)


#: Warps that share a ring of three places: one may be two laps ahead of a copy.
NARROW = HopperTiles(8, 32, 1, 2, 2)


@pytest.mark.parametrize(
    ("op", "quant", "tokens", "n", "k", "tiles"),
    [
        ("linear", "fp8_row", 3, 70, 512, HopperTiles(8, 32, 1, 8, 8)),
        ("norm_linear_gated", "fp8_row", 3, 70, 512, HopperTiles(8, 32, 1, 8, 8)),
        ("linear_add", "fp8_row", 2, 30, 2048, NARROW),
        ("linear_add", "fp8_row", 11, 40, 640, HopperTiles(16, 16, 2, 4, 4)),
        ("norm_linear", "fp8_row", 11, 40, 640, HopperTiles(16, 16, 2, 4, 4)),
        ("linear", "fp8_row", 8, 2200, 256, HopperTiles(8, 16, 1, 2, 2)),  # two tiles a block
        ("norm_linear_gated", "fp8_row", 8, 1100, 256, HopperTiles(8, 16, 1, 2, 2)),
        ("linear_add", "int8_row", 1, 61, 1536, HopperTiles(8, 32, 4, 8, 4)),
        ("norm_linear", "int8_row", 1, 61, 1536, HopperTiles(8, 32, 4, 8, 4)),
        ("norm_linear_gated", "fp8_row", 1, 40, 384, HopperTiles(8, 32, 1, 4, 2)),
        ("norm_linear_gated", "int8_row", 16, 33, 384, HopperTiles(16, 64, 1, 4, 2)),
        ("linear_add", "fp8_g128", 11, 40, 640, HopperTiles(16, 16, 2, 4, 4)),  # a box past the columns
        ("norm_linear_gated", "fp8_g128", 3, 70, 512, HopperTiles(8, 32, 1, 8, 8)),
        ("norm_linear", "fp8_g128", 1, 61, 1536, HopperTiles(8, 32, 4, 8, 4)),
        ("linear", "fp8_g128", 8, 2200, 256, HopperTiles(8, 16, 1, 2, 2)),  # two tiles a block
        ("linear_add", "", 5, 40, 200, HopperTiles(8, 16, 2, 4, 4)),
        ("norm_linear_gated", "", 13, 40, 200, HopperTiles(16, 32, 1, 2, 1)),
    ],
)
def test_blocks_compute_what_the_reference_does(
    op: str, quant: str, tokens: int, n: int, k: int, tiles: HopperTiles, tmp_path: Path, monkeypatch: Any
) -> None:
    form, g = FORMS[op], torch.Generator().manual_seed(0)
    rows = 2 * n if form.gated else n
    x = (torch.randn(tokens, k, generator=g) * torch.logspace(-3, 3, tokens)[:, None]).bfloat16()
    x[0, 1] *= 30  # one that others of its token are small beside
    values = torch.randn(rows, k, generator=g) * k**-0.5
    bias = torch.randn(rows, generator=g) if op == "linear" else None
    extra = torch.randn(tokens, n, generator=g).bfloat16() if form.residual else torch.rand(k, generator=g)
    packed = values.bfloat16()
    if quant:
        packed, values = weight(values, quant)
    else:
        values = packed.float()
    kind = ["gelu_tanh"] if form.gated else []
    arguments = [x, values, bias, *kind, *([] if op == "linear" else [extra]), *([1e-5] if form.norm else [])]
    want = get_op(op).reference(*arguments)
    small = 12 << 10 if form.norm is None else 20 << 10  # so that the ring goes round
    room = 22 << 10 if tiles is NARROW else small + 24 * tiles.rows * tiles.tokens
    monkeypatch.setattr(hopper, "SHARED", room)
    given = [operand(x, dynamic=True), operand(values, quant=quant), bias if bias is None else operand(bias)]
    if op != "linear":
        given.append(operand(extra, dynamic=bool(form.residual)))
    outputs = (operand(want, dynamic=True),)
    spec = CallSpec(inputs=tuple(given), outputs=outputs, attrs={"eps": 1e-5, "kind": "gelu_tanh"})
    launch = hopper.product(spec, products.hopper_call(form, spec, 16), tiles)
    if tiles is NARROW:
        assert dict(launch.kernel.constants)["STAGES"] == 3
    compare(run(launch, [x, packed, bias, extra], want, tmp_path, tokens), want, 1e-2, "result")


@pytest.mark.parametrize(
    ("codes", "tokens", "n", "k", "tiles"),
    [
        ("int8", 1, 61, 1536, HopperTiles(8, 32, 4, 8, 4)),
        ("fp8", 11, 40, 640, HopperTiles(16, 16, 2, 4, 4)),
        pytest.param(
            "fp8", 8, 2200, 256, HopperTiles(8, 16, 1, 2, 2), marks=pytest.mark.slow
        ),  # two tiles a block
    ],
)
def test_codes_of_a_static_scale_are_read(
    codes: str, tokens: int, n: int, k: int, tiles: HopperTiles, tmp_path: Path
) -> None:
    form, g = FORMS["linear_add"], torch.Generator().manual_seed(0)
    x, residual = (torch.randn(tokens, width, generator=g).bfloat16() for width in (k, n))
    packed, values = weight(torch.randn(n, k, generator=g) * k**-0.5, f"{codes}_row")
    scale = scale_of(x, codes) / 2
    x = to_codes(x, scale, codes)
    want = get_op("linear_add").reference(x, values, None, residual, scale, codes)
    given = (
        operand(x, dynamic=True),
        operand(values, quant=f"{codes}_row"),
        None,
        operand(residual, dynamic=True),
    )
    attrs = {"x_scale": scale, "x_codes": codes}
    spec = CallSpec(inputs=given, outputs=(operand(want, dynamic=True),), attrs=attrs)
    launch = hopper.product(spec, products.hopper_call(form, spec, 16), tiles)
    compare(run(launch, [x, packed, None, residual], want, tmp_path, tokens), want, 3e-3, "result")


@pytest.mark.parametrize("codes", ["fp8", "int8"])
def test_codes_that_are_left_are_of_what_would_be_left_without(codes: str, tmp_path: Path) -> None:
    form, g = FORMS["norm_linear_gated"], torch.Generator().manual_seed(0)
    tokens, n, k = 11, 33, 384
    x, norm = torch.randn(tokens, k, generator=g).bfloat16(), torch.rand(k, generator=g)
    packed, values = weight(torch.randn(2 * n, k, generator=g) * k**-0.5, f"{codes}_row")
    given = (operand(x, dynamic=True), operand(values, quant=f"{codes}_row"), None, operand(norm))
    want = torch.zeros(tokens, n).bfloat16()
    left = {}
    for y_scale in (
        0.0,
        2.0**-10 if codes == "fp8" else 2.0**-8,
    ):  # whose inverse is exact; some are out of reach
        attrs = {"eps": 1e-5, "kind": "silu", **({"y_scale": y_scale, "y_codes": codes} if y_scale else {})}
        out = to_codes(want, y_scale, codes) if y_scale else want
        spec = CallSpec(inputs=given, outputs=(operand(out, dynamic=True),), attrs=attrs)
        launch = hopper.product(spec, products.hopper_call(form, spec, 16), HopperTiles(16, 64, 1, 4, 2))
        (folder := tmp_path / str(y_scale)).mkdir()
        left[y_scale] = run(launch, [x, packed, None, norm], out, folder, tokens)
    elements, (y_scale, found) = left.pop(0.0), left.popitem()
    assert torch.equal(found.float(), to_codes(elements, y_scale, codes).float())
    assert (found.float().abs() == LARGEST[codes]).sum() > 1


def weight(values: Any, quant: str) -> tuple[Any, Any]:
    """Packed, and what it then stands for."""
    host = encode(values.numpy(), quant)
    packed = torch.from_numpy(LAYOUTS["rows8"].pack(host))
    return packed, torch.from_numpy(group_blocks.decode(host.data, quant).reshape(values.shape))


def run(launch: LaunchSpec, inputs: list[Any], want: Any, folder: Path, tokens: int) -> Any:
    """What the blocks write, one after another; of floats nothing may be missing."""
    source = launch.kernel
    assert isinstance(source, CudaSource)
    rest = torch.zeros(16 - tokens, inputs[0].shape[1]).to(inputs[0].dtype)
    inputs[0] = torch.cat([inputs[0].view(torch.uint8), rest.view(torch.uint8)])
    out = torch.full((*want.shape, want.itemsize), 0xFF, dtype=torch.uint8).view(want.dtype).squeeze(-1)
    arguments: list[Any] = []
    for argument in launch.arguments:
        tensor = out if argument.kind == "output" else inputs[argument.index]
        if argument.kind == "tensor_map":
            assert argument.map is not None
            arguments.append(encoded(argument.map, tensor.data_ptr()))
        elif argument.kind == "float":
            arguments.append(C.c_float(argument.value))
        elif argument.kind == "dim":
            arguments.append(tokens)
        else:
            arguments.append(None if argument.kind == "workspace" else C.c_void_p(tensor.data_ptr()))
    (grid,) = launch.grid
    blocks = sum(term.value({"T": tokens}) for term in grid)
    assert library(source, folder).run(source.threads, source.shared + 1024, blocks, *arguments) == 0
    assert out.float().isfinite().all()
    return out
