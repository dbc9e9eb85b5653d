"""The kernel of many tokens and packed weights (``hopper_wide.cu``) run on a CPU, its PTX emulated."""

from __future__ import annotations

import ctypes as C
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.kernels.cuda_on_cpu import library
from tests.kernels.product_results import TOLERANCE, relative_error
from tests.kernels.test_packed_on_cpu import aligned

from pelton.ir.block_encoder import quantize
from pelton.ir.blocks import dequantize
from pelton.ir.tensors import bf16_to_f32, f32_to_bf16
from pelton.kernels.launch import CallSpec, LaunchSpec, OperandSpec
from pelton.kernels.layouts import LAYOUTS
from pelton.kernels.linear.packed_wide import WideTiles, wide
from pelton.kernels.linear.products import Form

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++")

RUN = """
extern "C" int run(int clusters, int tiles, SIGNATURE) {
    for (int y = 0; y < tiles; ++y)
        for (int i = 0; i < clusters; ++i)
            if (cpu::first = i * CLUSTER; !cpu::run(CLUSTER, LAUNCHED, SHARED, y, 0, [&] { CALL; })) return 1;
    return 0;
}
"""
ADD, GATED = Form(residual=3), Form(gated=True)


class TensorMap(C.Structure):
    """The header's."""

    _fields_ = (("base", C.c_void_p), ("columns", C.c_int), ("rows", C.c_int), ("box_rows", C.c_int))


@pytest.mark.parametrize(
    ("quant", "n", "k", "form", "tokens", "tiles", "bias"),
    [
        ("int4_g128", 64, 256, Form(), 20, WideTiles(32, 1, 1, 1, 4), False),
        ("int4_g128", 64, 1536, Form(), 60, WideTiles(64, 1, 4, 2, 4, sums=True), False),
        ("int4_g128", 112, 384, GATED, 40, WideTiles(64, 2, 1, 1, 7, sums=True), False),  # two rounds
        ("int4_g128", 80, 256, GATED, 100, WideTiles(128, 2, 1, 1, 5), True),
        ("int4_g128", 208, 384, ADD, 70, WideTiles(128, 3, 1, 4, 12), True),  # blocks without columns
        ("int4_g64", 128, 896, ADD, 130, WideTiles(128, 2, 2, 2, 8), False),
        ("int4_g32", 80, 640, ADD, 17, WideTiles(32, 1, 4, 2, 4), True),
        ("int4_g128", 96, 384, GATED, 250, WideTiles(256, 2, 1, 1, 6, steps=4), True),
        ("int4_g128", 240, 384, GATED, 250, WideTiles(256, 2, 1, 1, 6, half_strip=True, steps=4), True),
        ("int4_g64", 320, 256, Form(), 180, WideTiles(256, 2, 1, 1, 4, half_strip=True), False),
        ("int4_g64", 144, 256, Form(), 140, WideTiles(256, 2, 1, 1, 8), False),
        ("int4_g128", 192, 384, ADD, 200, WideTiles(256, 2, 1, 1, 12), True),  # two rounds
        ("int4_g128", 128, 256, ADD, 100, WideTiles(128, 1, 1, 1, 8), False),
        ("int4_g128", 192, 640, ADD, 250, WideTiles(256, 2, 1, 2, 4, half_strip=True), True),
        ("int8_g32", 320, 384, Form(), 180, WideTiles(256, 2, 1, 2, 4, half_strip=True), False),
        ("int8_g32", 128, 896, ADD, 250, WideTiles(256, 1, 2, 2, 4), True),
        ("int8_g64", 240, 384, GATED, 250, WideTiles(256, 2, 1, 1, 6, half_strip=True), False),
        ("q4_k", 192, 768, Form(), 100, WideTiles(128, 2, 1, 2, 4, half_strip=True), False),
        ("int8_g128", 320, 384, Form(), 180, WideTiles(256, 2, 1, 2, 4, half_strip=True), False),
        ("int4_g64", 112, 256, GATED, 250, WideTiles(256, 2, 1, 2, 2, half_strip=True), False),
        ("nf4_g64", 80, 1024, ADD, 250, WideTiles(256, 1, 2, 2, 4), False),
        ("int4_g128", 144, 256, ADD, 100, WideTiles(128, 2, 1, 1, 4), True),
        ("int4_g32", 48, 1280, GATED, 50, WideTiles(64, 2, 2, 2, 4), False),
        ("int4_g128", 64, 768, Form(), 60, WideTiles(64, 1, 3, 2, 4, sums=True), False),
        ("int3_g64", 48, 256, GATED, 9, WideTiles(32, 3, 1, 1, 6), False),
        ("int8_g128", 64, 256, Form(), 20, WideTiles(32, 1, 1, 1, 4, sums=True), True),
        ("int8_g32", 80, 256, GATED, 40, WideTiles(64, 2, 1, 1, 8), False),
        ("fp8_g128", 64, 2560, ADD, 60, WideTiles(64, 1, 4, 2, 4, sums=True), False),  # a ring of five units
        ("fp8_g128", 64, 512, Form(), 20, WideTiles(32, 1, 4, 1, 4, sums=True), False),
        ("fp8_g128", 48, 256, Form(), 70, WideTiles(128, 1, 1, 2, 4, steps=2), True),
        ("nf4_g64", 64, 384, Form(), 20, WideTiles(32, 1, 2, 1, 4), True),
        ("fp4_g64", 48, 256, GATED, 20, WideTiles(32, 2, 1, 1, 8, steps=4), False),
        ("nvfp4", 64, 384, Form(), 33, WideTiles(64, 1, 2, 1, 4), True),
        ("nvfp4", 80, 256, GATED, 20, WideTiles(32, 2, 1, 1, 8, steps=4), False),
        ("mxfp4", 64, 384, Form(), 20, WideTiles(32, 1, 2, 1, 4), False),
        ("int8_row", 48, 256, GATED, 20, WideTiles(32, 2, 1, 1, 4), False),
        ("q4_1", 64, 384, Form(), 20, WideTiles(32, 1, 2, 1, 4), True),
        ("q5_0", 80, 256, GATED, 20, WideTiles(32, 2, 1, 1, 8, steps=4), False),
        ("q5_1", 64, 384, ADD, 33, WideTiles(64, 1, 2, 1, 4), False),
        ("q2_k", 64, 512, Form(), 20, WideTiles(32, 1, 2, 1, 4), False),
        ("q3_k", 48, 256, GATED, 20, WideTiles(32, 2, 1, 1, 8), False),
        ("q4_k", 80, 768, ADD, 17, WideTiles(32, 1, 4, 2, 4), True),
        ("q4_k", 240, 256, GATED, 250, WideTiles(256, 2, 1, 1, 6, half_strip=True), False),
        ("q5_k", 112, 256, GATED, 40, WideTiles(64, 2, 1, 1, 7), False),
        ("q6_k", 64, 768, ADD, 60, WideTiles(64, 1, 4, 2, 4), True),
        ("q4_k", 64, 512, Form(), 140, WideTiles(256, 1, 2, 2, 4, steps=1), False),
    ],
)
def test_products_are_what_the_weight_says(
    quant: str, n: int, k: int, form: Form, tokens: int, tiles: WideTiles, bias: bool, tmp_path: Path
) -> None:
    rng, rows = np.random.default_rng(0), 2 * n if form.gated else n
    weight = quantize(rng.standard_normal((rows, k), dtype=np.float32) + np.float32(0.2), quant)
    x = f32_to_bf16(rng.standard_normal((tokens, k), dtype=np.float32) + 0.3)
    offsets = rng.standard_normal(rows, dtype=np.float32) * 10
    residual = f32_to_bf16(rng.standard_normal((tokens, n), dtype=np.float32) * 10)

    def operand(*shape: Any, dtype: str, quant: str = "") -> OperandSpec:
        return OperandSpec(dtype=dtype, shape=shape, strides=(*shape[1:], 1), quant=quant)

    call = CallSpec(
        inputs=(
            operand("T", k, dtype="bfloat16"),
            operand(rows, k, dtype="uint8", quant=quant),
            operand(rows, dtype="float32") if bias else None,
            operand("T", n, dtype="bfloat16"),
        ),
        outputs=(operand("T", n, dtype="bfloat16"),),
        attrs={"kind": "silu"},
    )
    (launch,) = wide(form, call, tiles, tokens)
    assert isinstance(launch, LaunchSpec)
    out = np.full((tokens, n), 0x7FC0, np.uint16)
    inputs = [aligned(a) for a in (x, LAYOUTS["mma16"].pack(weight), offsets, residual)]
    columns, rows_of_tokens = (sum(t.value({"T": tokens}) for t in axis) for axis in launch.grid)
    given: list[Any] = [C.c_int(columns // tiles.cluster), C.c_int(rows_of_tokens)]
    for argument in launch.arguments:
        match argument.kind:
            case "tensor_map":
                given.append(TensorMap(inputs[0].ctypes.data, k, tokens, tiles.tokens))
            case "input" | "output":
                array = out if argument.kind == "output" else inputs[argument.index]
                given.append(C.c_void_p(array.ctypes.data))
            case "dim":
                given.append(C.c_int(tokens))
            case _:
                given.append(C.c_void_p(0))
    assert library(launch, RUN, tmp_path, "wide_on_cpu.h").run(*given) == 0, (
        "threads wait for ever, or copies for nobody"
    )

    y = bf16_to_f32(x).astype(np.float64) @ dequantize(weight).T.astype(np.float64)
    assert relative_error(out, y, form, offsets if bias else None, residual) < TOLERANCE
