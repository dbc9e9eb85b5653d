"""Products of 16-bit weights (``hopper_products.cu``) run on a CPU, their PTX emulated."""

from __future__ import annotations

import ctypes as C
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.kernels.cuda_on_cpu import library
from tests.kernels.test_blocks_on_cpu import RUN, TensorMap
from tests.kernels.test_packed_on_cpu import aligned

from pelton.ir.tensors import bf16_to_f32, f32_to_bf16
from pelton.kernels.launch import CallSpec, LaunchSpec, OperandSpec
from pelton.kernels.linear.hopper_products import ProductTiles, products
from pelton.kernels.linear.products import Form

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++")
ADD, GATED = Form(residual=3), Form(gated=True)


@pytest.mark.parametrize(
    ("n", "k", "form", "tokens", "tiles", "bias"),
    [
        (72, 584, ADD, 20, ProductTiles(1, 1, 1, 48, split=2), False),  # an odd number of sixteens to share
        (40, 1152, GATED, 70, ProductTiles(2, 1, 1, 32, split=2), True),
        (96, 1800, GATED, 200, ProductTiles(2, 1, 1, 64, share=2), False),  # one warp copies both
        (24, 520, ADD, 150, ProductTiles(3, 1, 1, 16, split=2), False),  # three warp groups
        pytest.param(16, 640, Form(), 20, ProductTiles(1, 1, 1, 16, split=2), False, marks=pytest.mark.slow),
        pytest.param(40, 520, ADD, 150, ProductTiles(2, 1, 1, 32, split=2), True, marks=pytest.mark.slow),
        # Several tiles a block.
        pytest.param(2200, 192, ADD, 9, ProductTiles(1, 1, 1, 16), False, marks=pytest.mark.slow),
    ],
)
def test_a_product_has_its_bias_activation_and_residual(
    n: int, k: int, form: Form, tokens: int, tiles: ProductTiles, bias: bool, tmp_path: Path
) -> None:
    rng, rows = np.random.default_rng(0), 2 * n if form.gated else n
    weight = f32_to_bf16(rng.standard_normal((rows, k), dtype=np.float32) / 16)
    x = f32_to_bf16(rng.standard_normal((tokens, k), dtype=np.float32))
    offsets = rng.standard_normal(rows, dtype=np.float32) * 10
    residual = f32_to_bf16(rng.standard_normal((tokens, n), dtype=np.float32) * 10)

    def operand(*shape: Any, dtype: str = "bfloat16") -> OperandSpec:
        return OperandSpec(dtype=dtype, shape=shape, strides=(*shape[1:], 1))

    call = CallSpec(
        inputs=(
            operand("T", k),
            operand(rows, k),
            operand(rows, dtype="float32") if bias else None,
            operand("T", n),
        ),
        outputs=(operand("T", n),),
        attrs={"kind": "silu"},
    )
    out = np.full((tokens, n), 0x7FC0, np.uint16)
    inputs = [aligned(a) for a in (x, weight, offsets, residual)]
    (launch,) = products(form, call, tiles, tokens)
    assert isinstance(launch, LaunchSpec)
    (count,) = (sum(t.value({"T": tokens}) for t in axis) for axis in launch.grid)
    given: list[Any] = [C.c_int(count)]
    for argument in launch.arguments:
        match argument.kind:
            case "tensor_map":
                assert argument.map is not None
                at, box = inputs[argument.index].ctypes.data, int(np.prod(argument.map.box[1:]))
                half = n if form.gated and argument.index == 1 else 0
                given.append(TensorMap(at, k, tokens if argument.index == 0 else rows, box, half))
            case "input" | "output":
                array = out if argument.kind == "output" else inputs[argument.index]
                given.append(C.c_void_p(array.ctypes.data))
            case "dim":
                given.append(C.c_int(tokens))
            case "float":
                given.append(C.c_float(argument.value))
            case _:
                given.append(C.c_void_p(0))
    assert library(launch, RUN, tmp_path, "products_on_cpu.h").run(*given) == 0, (
        "threads wait for ever, or copies for nobody"
    )

    y = bf16_to_f32(x).astype(np.float64) @ bf16_to_f32(weight).astype(np.float64).T
    if bias:
        y += offsets
    if form.gated:
        y = y[:, :n] / (1 + np.exp(-y[:, :n])) * y[:, n:]
    if form.residual is not None:
        y += bf16_to_f32(residual)
    assert np.linalg.norm(bf16_to_f32(out) - y) / np.linalg.norm(y) < 5e-3
