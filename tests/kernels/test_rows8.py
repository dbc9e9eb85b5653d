"""Weights of 8-bit codes in rows (layout ``rows8``): who takes them, and how they become dense rows."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.kernels.interpreter import skip_where_the_interpreter_fails

from pelton.kernels.launch import COUNTER_BYTES, CallSpec, KernelSource, LaunchSpec, MatmulSpec, OperandSpec
from pelton.kernels.linear import hopper
from pelton.kernels.linear.products import MOST_NORMED, Form
from pelton.kernels.linear.rows8 import supports_rows8, unpacked, unpacked_bytes
from pelton.kernels.linear.tiles import PROCESSORS, rows8_tiles
from pelton.kernels.tactic import NodeSpec, TensorSpec, shipped_tactics

UNPACK = """
import numpy as np
import torch
from pelton.ir.group_blocks import decode
from pelton.ir.group_encoder import encode
from pelton.kernels.gpu_rows8 import row_bytes, scales_at
from pelton.kernels.layouts import LAYOUTS
from pelton.kernels.linear.triton_unpack import unpack_rows

values = np.random.default_rng(0).standard_normal((45, 384), dtype=np.float32)
for quant, code, group in (("fp8_row", "e4m3", 0), ("int8_row", "s8", 0), ("fp8_g128", "e4m3", 128)):
    tensor = encode(values, quant)
    packed = torch.from_numpy(LAYOUTS["rows8"].pack(tensor))
    out = torch.full((46, 384), float("nan"))
    unpack_rows[(3, 2)](
        packed, out, N=45, K=384, ROW=row_bytes(384), SCALES=scales_at((45, 384)), CODE=code, ROWS=32,
        COLUMNS=128, GROUP=group,
    )
    np.testing.assert_array_equal(out[:45].numpy(), decode(tensor.data, quant))
    assert out[45].isnan().all()
print("right")
"""


def test_codes_become_dense_rows(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    skip_where_the_interpreter_fails()
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", UNPACK], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def node(
    quant: str = "fp8_row", n: int = 64, k: int = 256, *, x: str = "bfloat16", activations: str = "float32"
) -> NodeSpec:
    inputs = (TensorSpec(dtype=x, shape=("T", k)), TensorSpec.of_weight(quant, (n, k)), None)
    return NodeSpec(op="linear", inputs=inputs, attrs={}, activations=activations)


def test_weights_of_whole_boxes_are_taken_where_activations_are_bfloat16() -> None:
    assert supports_rows8(Form(), node())
    assert supports_rows8(Form(), node("int8_row", n=33))
    for other in (node("int8_g64"), node(k=192), node(x="float16")):
        assert not supports_rows8(Form(), other)
    assert supports_rows8(Form(), node(activations="fp8"))
    # Of scales of blocks, where inputs are rounded too.
    assert not supports_rows8(Form(), node("fp8_g128"))
    assert supports_rows8(Form(), node("fp8_g128", activations="fp8"))
    # Weights of fp8 take no inputs of int8, so that nothing is lost.
    assert supports_rows8(Form(), node(activations="int8"))


def call(n: int, *, gated: bool = False, bias: bool = False) -> CallSpec:
    k = 256
    x = OperandSpec(dtype="bfloat16", shape=("T", k), strides=(k, 1))
    weight = OperandSpec(dtype="uint8", shape=(n, k), strides=(k, 1), quant="fp8_row")
    vector = OperandSpec(dtype="float32", shape=(n,), strides=(1,)) if bias else None
    out = OperandSpec(dtype="bfloat16", shape=("T", n // 2 if gated else n), strides=(n, 1))
    return CallSpec(inputs=(x, weight, vector), outputs=(out,), attrs={"kind": "silu", "eps": 1e-5})


@pytest.mark.parametrize(
    ("gated", "bias", "n", "product"),
    [(False, False, 33, "cuBLASLt"), (True, False, 64, "cuBLASLt"), (False, True, 64, "gemm")]
    + [(True, False, 66, "gemm")],
)
def test_dense_rows_are_multiplied_by_what_can(gated: bool, bias: bool, n: int, product: str) -> None:
    spec, form = call(n, gated=gated, bias=bias), Form(gated=gated)
    dense, multiply, *_ = unpacked(form, spec, 40)
    assert isinstance(dense, LaunchSpec)
    (where,) = (a.offset for a in dense.arguments if a.kind == "workspace")
    if product == "gemm":
        assert isinstance(multiply, LaunchSpec) and isinstance(multiply.kernel, KernelSource)
        assert multiply.kernel.function == "gemm"
        assert where in [a.offset for a in multiply.arguments if a.kind == "workspace"]
    else:
        assert isinstance(multiply, MatmulSpec)
        assert multiply.weight.offset == where
    space = unpacked_bytes(form, node(n=n), 40)
    assert where - COUNTER_BYTES + n * 256 * 2 <= space


@pytest.mark.parametrize("tokens", [8, 16])
@pytest.mark.parametrize("k", [128, 1024, 4096, 8192, 16384, 53248])
@pytest.mark.parametrize("n", [1, 33, 1024, 4096, 6144, 14336, 28672, 128256])
def test_there_are_tiles_for_every_shape(n: int, k: int, tokens: int) -> None:
    for kind, norm in (("", None), ("", 3), ("silu", 3), ("silu", None)):
        if norm is not None and k > MOST_NORMED:
            continue
        product = hopper.HopperProduct(
            n=n, k=k, kind=kind, dtype="bfloat16", max_tokens=tokens, residual=None, norm=norm, bias=False,
            quant="fp8_row",
        )  # fmt: skip
        tiles = next(t for t in rows8_tiles(n, k, tokens, bool(kind)) if hopper.plan(product, t))
        plan = hopper.plan(product, tiles)
        assert plan is not None
        rows = tiles.rows // 2 if kind else tiles.rows
        assert plan.workers * plan.each * rows >= n > (plan.workers * plan.each - plan.workers) * rows
        assert tiles.rows % (16 * tiles.warps // tiles.splits) == 0 and tiles.rows <= 256
        # Blocks share what there is but for a fifth, where it is worth sharing.
        if n * k > 1 << 22:
            assert n * 1.35 >= plan.each * rows * min(PROCESSORS, -(-n // rows))


@pytest.mark.parametrize("codes", ["int8", "fp8"])
@pytest.mark.parametrize("quant", ["int8_row", "fp8_row", "int4_g128", "fp8_g128"])
def test_inputs_with_a_static_scale_have_only_tactics_that_round_them(quant: str, codes: str) -> None:
    plain = node(quant, 512, 512, activations=codes)
    rounded = replace(plain, attrs={"x_scale": 0.1, "x_codes": codes})
    for name, tactic in shipped_tactics("linear").items():
        assert not tactic.supports(rounded) or tactic.precision == codes, name
