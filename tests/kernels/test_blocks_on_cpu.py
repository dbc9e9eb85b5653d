"""The kernel of codes with a scale for 128 columns (``hopper_blocks.cu``) run on a CPU, its PTX emulated.

x is as ``hopper_quantize.cu`` makes it.
"""

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

from pelton.ir import group_blocks, group_encoder
from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.tensors import bf16_to_f32, f32_to_bf16
from pelton.kernels.launch import COUNTER_BYTES, CallSpec, CudaSource, LaunchSpec, OperandSpec
from pelton.kernels.layouts import LAYOUTS
from pelton.kernels.linear.hopper_blocks import BlockTiles, blocks, x_bytes
from pelton.kernels.linear.products import Form
from pelton.quant.activations import rounded_activations

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++")

RUN = """
extern "C" int run(int count, SIGNATURE) {
    cpu::grid = {count, 1, 1};
    for (cpu::first = 0; cpu::first < count; cpu::first += SPLIT * SHARE)
        if (!cpu::run(SPLIT * SHARE, LAUNCHED, SHARED, 0, 0, [&] { CALL; })) return 1;
    return 0;
}
"""
ADD, GATED = Form(residual=3), Form(gated=True)


class TensorMap(C.Structure):
    """The header's."""

    _fields_ = (
        ("base", C.c_void_p),
        ("columns", C.c_int),
        ("rows", C.c_int),
        ("box_rows", C.c_int),
        ("half", C.c_int),
    )


@pytest.mark.parametrize(
    ("n", "k", "form", "tokens", "tiles", "bias"),
    [
        (72, 256, Form(), 20, BlockTiles(1, 2, 1, 32), True),
        (64, 384, ADD, 130, BlockTiles(2, 1, 1, 48, ahead=True), False),  # two tiles of tokens
        (40, 128, GATED, 70, BlockTiles(2, 1, 1, 32, share=2), True),
        (64, 1152, ADD, 17, BlockTiles(1, 2, 1, 32, split=2, ahead=True), False),
        (40, 384, ADD, 130, BlockTiles(2, 1, 1, 48, split=2), True),  # an odd number of sixteens to share
        # More tokens than the tiles of a cluster.
        (48, 256, GATED, 270, BlockTiles(2, 1, 1, 64, share=2), False),
    ],
)
def test_products_are_of_inputs_rounded_by_groups(
    n: int, k: int, form: Form, tokens: int, tiles: BlockTiles, bias: bool, tmp_path: Path
) -> None:
    rng, rows = np.random.default_rng(0), 2 * n if form.gated else n
    spread = np.exp(rng.standard_normal((1, k), dtype=np.float32) * 2)
    weight = group_encoder.encode(rng.standard_normal((rows, k), dtype=np.float32) * spread, "fp8_g128")
    x = f32_to_bf16(rng.standard_normal((tokens, k), dtype=np.float32) / spread)
    offsets = rng.standard_normal(rows, dtype=np.float32) * 10
    residual = f32_to_bf16(rng.standard_normal((tokens, n), dtype=np.float32) * 10)

    def operand(*shape: Any, dtype: str, quant: str = "") -> OperandSpec:
        return OperandSpec(dtype=dtype, shape=shape, strides=(*shape[1:], 1), quant=quant)

    call = CallSpec(
        inputs=(
            operand("T", k, dtype="bfloat16"),
            operand(rows, k, dtype="uint8", quant="fp8_g128"),
            operand(rows, dtype="float32") if bias else None,
            operand("T", n, dtype="bfloat16"),
        ),
        outputs=(operand("T", n, dtype="bfloat16"),),
        attrs={"kind": "silu"},
    )
    out = np.full((tokens, n), 0x7FC0, np.uint16)
    inputs = [aligned(a) for a in (x, LAYOUTS["rows8"].pack(weight), offsets, residual)]
    scratch = aligned(np.full(COUNTER_BYTES + x_bytes(k, tokens), 0xFF, np.uint8))
    for launch in blocks(form, call, tiles, tokens):
        assert isinstance(launch, LaunchSpec)
        (count,) = (sum(t.value({"T": tokens}) for t in axis) for axis in launch.grid)
        given: list[Any] = [C.c_int(count)]
        for argument in launch.arguments:
            at = scratch.ctypes.data + argument.offset
            match argument.kind:
                case "tensor_map":
                    assert argument.map is not None
                    box = int(np.prod(argument.map.box[1:]))
                    if argument.of == "workspace":
                        given.append(TensorMap(at, k, tokens, box, 0))
                    else:
                        at = inputs[argument.index].ctypes.data
                        given.append(TensorMap(at, k, rows, box, n if form.gated else 0))
                case "input" | "output":
                    array = out if argument.kind == "output" else inputs[argument.index]
                    given.append(C.c_void_p(array.ctypes.data))
                case "dim":
                    given.append(C.c_int(tokens))
                case "float":
                    given.append(C.c_float(argument.value))
                case _:
                    given.append(C.c_void_p(at))
        assert isinstance(launch.kernel, CudaSource)
        folder = tmp_path / launch.kernel.function
        folder.mkdir()
        run = RUN if launch.kernel.function == "blocks" else RUN.replace("SPLIT * SHARE", "1")
        header = "blocks_on_cpu.h" if launch.kernel.function == "blocks" else "cuda_on_cpu.h"
        assert library(launch, run, folder, header).run(*given) == 0, (
            "threads wait for ever, or copies for nobody"
        )

    decoded = group_blocks.decode(weight.data.view(np.uint8), "fp8_g128").reshape(rows, k)
    seen = rounded_activations(bf16_to_f32(x), ActivationQuant(dtype="fp8", group=128))
    y = seen.astype(np.float64) @ decoded.T.astype(np.float64)
    assert relative_error(out, y, form, offsets if bias else None, residual) < TOLERANCE
