"""The kernel of few tokens and packed weights (``packed.cu``) run on a CPU, its PTX emulated."""

from __future__ import annotations

import ctypes as C
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.kernels.cuda_on_cpu import library
from tests.kernels.product_results import relative_error

from pelton.ir.block_encoder import quantize
from pelton.ir.blocks import dequantize
from pelton.ir.tensors import bf16_to_f32, f32_to_bf16
from pelton.kernels.launch import CallSpec, OperandSpec
from pelton.kernels.layouts import LAYOUTS
from pelton.kernels.linear import packed_few
from pelton.kernels.linear.packed_few import FewTiles, few
from pelton.kernels.linear.products import Form

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++")

RUN = """
extern "C" int run(SIGNATURE) {
    for (int i = 0; i < WORKERS; ++i)
        if (cpu::first = i * CLUSTER; !cpu::run(CLUSTER, LAUNCHED, SHARED, 0, 0, [&] { CALL; })) return 1;
    return 0;
}
"""
NORM, ADD, GATED = Form(norm=3), Form(residual=3), Form(gated=True)
NORM_GATED = Form(gated=True, norm=3)


def tiles(
    tokens: int, splits: int, parts: int, batch: int, cluster: int, groups: int = 1, shared: int = 200 << 10
) -> FewTiles:
    return FewTiles(tokens, splits, parts, batch, cluster, groups, shared)


def aligned(values: Any) -> Any:
    """A copy at a multiple of 16 bytes, as the device's memory is."""
    raw = np.zeros(values.nbytes + 16, np.uint8)
    place = raw[-raw.ctypes.data % 16 :][: values.nbytes].view(values.dtype).reshape(values.shape)
    place[...] = values
    return place


@pytest.mark.parametrize(
    ("quant", "n", "k", "form", "tokens", "how"),
    [
        ("int4_g128", 64, 512, Form(), 1, tiles(1, 2, 1, 2, 1)),
        ("int4_g128", 256, 896, NORM_GATED, 1, tiles(1, 4, 1, 1, 1, 2, 40 << 10)),
        ("int4_g128", 128, 512, NORM_GATED, 1, tiles(1, 2, 1, 2, 2)),
        ("int4_g128", 160, 1024, NORM, 7, tiles(8, 2, 1, 3, 2, 1, 60 << 10)),
        ("int4_g128", 192, 1280, NORM_GATED, 16, tiles(16, 2, 2, 1, 2, 2, 68 << 10)),
        ("int4_g128", 384, 640, ADD, 3, tiles(4, 4, 1, 2, 1, 4, 32 << 10)),
        ("int4_g128", 160, 1024, ADD, 16, tiles(16, 1, 2, 3, 8, 1, 64 << 10)),
        ("int4_g128", 96, 1024, NORM, 5, tiles(8, 2, 4, 2, 4, 2)),
        ("int4_g32", 64, 512, ADD, 5, tiles(8, 4, 1, 2, 1)),
        ("int3_g64", 64, 512, NORM, 4, tiles(4, 2, 2, 1, 2)),
        ("int8_g64", 64, 512, ADD, 11, tiles(16, 2, 2, 1, 2, 2)),
        ("int8_row", 64, 512, ADD, 2, tiles(2, 2, 2, 1, 2)),
        ("fp8_row", 64, 512, NORM, 8, tiles(8, 2, 2, 1, 1, 2)),
        ("fp8_g128", 64, 512, NORM_GATED, 8, tiles(8, 2, 1, 1, 4)),
        ("fp4_g64", 64, 512, GATED, 7, tiles(8, 2, 1, 1, 2)),
        ("nf4_g64", 64, 512, NORM, 1, tiles(1, 4, 1, 2, 1, 2)),
        ("nf4_g64", 64, 512, GATED, 6, tiles(8, 2, 1, 1, 2)),
        ("nvfp4", 96, 768, NORM_GATED, 1, tiles(1, 3, 1, 1, 2)),
        ("nvfp4", 64, 512, ADD, 7, tiles(8, 2, 2, 1, 2)),
        ("mxfp4", 64, 512, NORM, 4, tiles(4, 4, 1, 2, 1, 4)),
        ("mxfp4", 64, 512, GATED, 13, tiles(16, 2, 1, 1, 2)),
        ("q4_1", 64, 512, NORM, 7, tiles(8, 4, 1, 2, 1)),
        ("q5_0", 64, 512, GATED, 1, tiles(1, 2, 1, 2, 1)),
        ("q5_1", 64, 512, Form(), 2, tiles(2, 2, 2, 1, 2)),
        ("q2_k", 64, 512, Form(), 1, tiles(1, 2, 1, 1, 1)),
        ("q3_k", 64, 512, ADD, 8, tiles(8, 2, 1, 2, 2)),
        ("q4_k", 256, 768, NORM_GATED, 1, tiles(1, 3, 1, 1, 1, 1, 40 << 10)),
        ("q4_k", 160, 1024, NORM, 16, tiles(16, 2, 2, 1, 2, 2)),
        ("q5_k", 64, 512, NORM_GATED, 5, tiles(8, 2, 1, 2, 2)),
        ("q6_k", 192, 512, NORM, 1, tiles(1, 4, 1, 3, 1, 2, 60 << 10)),
        ("q6_k", 64, 512, GATED, 13, tiles(16, 2, 1, 1, 2)),
    ],
)
# A bias for even numbers of tokens; for odd ones where all is asked for.
@pytest.mark.parametrize("odd", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_products_are_what_the_weight_says(
    quant: str,
    n: int,
    k: int,
    form: Form,
    tokens: int,
    how: FewTiles,
    odd: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed_few, "_CLUSTERS", {1: 4, 2: 2, 4: 1, 8: 1})  # so that each has several panels
    bias = tokens % 2 == int(odd)
    assert error_of(quant, n, k, form, tokens, how, bias, 1.0, tmp_path) < 5e-3


@pytest.mark.parametrize(
    "quant", ["int4_g128", "int8_row", "fp8_row", "fp4_g64", "nf4_g64", "nvfp4", "mxfp4", "q4_k", "q6_k"]
)
@pytest.mark.parametrize("size", [2.0**60, 2.0**-40])
def test_inputs_may_be_as_large_and_small_as_networks_have_them(
    quant: str, size: float, tmp_path: Path
) -> None:
    """float16 ends at 2^16; a norm's float32 sum of squares at 2^64."""
    assert error_of(quant, 32, 256, Form(), 8, tiles(8, 2, 1, 1, 1), False, size, tmp_path) < 5e-3


def error_of(
    quant: str,
    n: int,
    k: int,
    form: Form,
    tokens: int,
    how: FewTiles,
    bias: bool,
    size: float,
    folder: Path,
) -> float:
    """Of the kernel's results, relative, with inputs some ``size`` large."""
    rng, rows = np.random.default_rng(0), 2 * n if form.gated else n
    weight = quantize(rng.standard_normal((rows, k), dtype=np.float32) + np.float32(0.2), quant)
    x = f32_to_bf16((rng.standard_normal((tokens, k), dtype=np.float32) + 0.3) * np.float32(size))
    gains = rng.random(k, dtype=np.float32) + 0.5
    offsets = rng.standard_normal(rows, dtype=np.float32) * 10
    residual = f32_to_bf16(rng.standard_normal((tokens, n), dtype=np.float32) * 10)

    def operand(*shape: Any, dtype: str, quant: str = "") -> OperandSpec:
        return OperandSpec(dtype=dtype, shape=shape, strides=(*shape[1:], 1), quant=quant)

    call = CallSpec(
        inputs=(
            operand("T", k, dtype="bfloat16"),
            operand(rows, k, dtype="uint8", quant=quant),
            operand(rows, dtype="float32") if bias else None,
            operand(k, dtype="float32") if form.norm else operand("T", n, dtype="bfloat16"),
        ),
        outputs=(operand("T", n, dtype="bfloat16"),),
        attrs={"kind": "silu", "eps": 1e-5},
    )
    launch = few(form, call, how)
    out = np.full((tokens, n), 0x7FC0, np.uint16)
    packed = LAYOUTS["mma16"].pack(weight)
    inputs = [aligned(a) for a in (x, packed, offsets, gains if form.norm else residual)]
    given: list[Any] = []
    for argument in launch.arguments:
        match argument.kind:
            case "input" | "output":
                array = out if argument.kind == "output" else inputs[argument.index]
                given.append(C.c_void_p(array.ctypes.data))
            case "float":
                given.append(C.c_float(argument.value))
            case "dim":
                given.append(C.c_int(tokens))
            case _:
                given.append(C.c_void_p(0))
    assert library(launch, RUN, folder).run(*given) == 0, "threads wait for ever, or copies for nobody"

    wide = bf16_to_f32(x).astype(np.float64)
    if form.norm is not None:
        wide = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * gains
    y = wide @ dequantize(weight).T.astype(np.float64)
    return relative_error(out, y, form, offsets if bias else None, residual)
