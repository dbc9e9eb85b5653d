"""The kernel that makes codes of rows (``hopper_quantize.cu``) run on a CPU, its PTX emulated."""

from __future__ import annotations

import ctypes as C
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from tests.kernels.cuda_on_cpu import library

from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.group_blocks import E4M3
from pelton.ir.ops import rms_norm
from pelton.ir.tensors import bf16_to_f32, f32_to_bf16
from pelton.kernels.launch import CallSpec, OperandSpec
from pelton.kernels.linear.hopper_products import code_rows, quantised
from pelton.kernels.linear.products import Form, Product
from pelton.quant.activations import rounded_activations

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++")

RUN = """
extern "C" int run(SIGNATURE, int rows) {
    for (cpu::first = 0; cpu::first < rows; ++cpu::first)
        if (!cpu::run(1, LAUNCHED, SHARED, 0, 0, [&] { CALL; })) return 1;
    return 0;
}
"""


def aligned(values: Any) -> Any:
    """A copy at a multiple of 16 bytes, as the device's memory is."""
    raw = np.zeros(values.nbytes + 16, np.uint8)
    place = raw[-raw.ctypes.data % 16 :][: values.nbytes].view(values.dtype).reshape(values.shape)
    place[...] = values
    return place


def quantise(
    x: Any, gains: Any, dtype: str, *, exact: bool, folder: Path, given: float = 0.0
) -> tuple[Any, Any]:
    """(Codes, scales) of bfloat16 rows; ``given``: a static scale."""
    tokens, k = x.shape
    form = Form() if gains is None else Form(norm=3)
    quant = {"int8": "int8_row", "fp8": "fp8_row"}[dtype]
    rows = OperandSpec(dtype="bfloat16", shape=("T", k), strides=(k, 1))
    weight = OperandSpec(dtype="uint8", shape=(16, k), strides=(k, 1), quant=quant)
    norm = OperandSpec(dtype="float32", shape=(k,), strides=(1,))
    call = CallSpec(inputs=(rows, weight, None, norm), outputs=(rows,), attrs={"eps": 1e-5, "x_scale": given})
    launch, _ = quantised(Product(form, call, tokens), exact)
    codes = np.full((code_rows(tokens, exact), k), 0xFF, np.uint8)
    scales = np.full(tokens, np.nan, np.float32)
    run = library(launch, RUN, folder).run
    run.argtypes = (*[C.c_void_p] * 4, C.c_float, C.c_float, C.c_int)
    unused = np.zeros(k, np.float32)
    arrays = f32_to_bf16(x), unused if gains is None else gains, codes, scales
    placed, norms, codes, scales = map(aligned, arrays)
    assert run(*(p.ctypes.data for p in (placed, norms, codes, scales)), 1e-5, given, tokens) == 0
    return codes, scales


def rows_of(tokens: int, k: int) -> Any:
    """Values of bfloat16 with a channel of large ones, and a row of zeros."""
    x = np.random.default_rng(0).standard_normal((tokens, k), dtype=np.float32) * 3
    x[:, 1] *= 40
    x[tokens // 2] = 0
    return bf16_to_f32(f32_to_bf16(x))


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize(("tokens", "k", "normed"), [(3, 128, False), (5, 384, True), (3, 1920, True)])
def test_rows_are_quantised_as_defined(
    dtype: Literal["int8", "fp8"], tokens: int, k: int, normed: bool, tmp_path: Path
) -> None:
    x = rows_of(tokens, k)
    gains = np.random.default_rng(1).random(k, np.float32) + 0.5 if normed else None
    codes, scales = quantise(x, gains, dtype, exact=False, folder=tmp_path)
    values = scales[:, None] * (codes.view(np.int8) if dtype == "int8" else E4M3[codes])
    seen = torch.from_numpy(x).bfloat16()
    if gains is not None:
        seen = rms_norm.reference(seen, torch.from_numpy(gains), 1e-5)
    want = rounded_activations(seen.float().numpy(), ActivationQuant(dtype=dtype))
    # A value halfway between two codes may fall to either side where the norm is summed in another order.
    off = np.abs(values - want) > 1e-5 * np.abs(want).max()
    assert off.mean() < 0.005


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a_static_scale_is_taken_as_it_is_and_its_last_code_for_what_is_out_of_reach(
    dtype: Literal["int8", "fp8"], tmp_path: Path
) -> None:
    x = rows_of(5, 384)
    given = float(np.float32(np.abs(x).max() / {"int8": 127, "fp8": 448}[dtype] / 3.1))
    codes, scales = quantise(x, None, dtype, exact=False, folder=tmp_path, given=given)
    assert (scales == np.float32(given)).all()
    values = np.float32(given) * (codes.view(np.int8) if dtype == "int8" else E4M3[codes])
    want = rounded_activations(x, ActivationQuant(dtype=dtype, per="tensor", scale=given))
    assert np.abs(want).max() < 0.4 * np.abs(x).max()
    # The kernel multiplies by the scale's inverse: a value halfway between two codes may fall to either side.
    off = np.abs(values - want) > 1e-5 * np.abs(want).max()
    assert off.mean() < 0.005


@pytest.mark.parametrize(("dtype", "lost"), [("int8", 0.501 / 32639), ("fp8", 2.0**-21)])
def test_two_codes_hold_a_bfloat16(dtype: str, lost: float, tmp_path: Path) -> None:
    """``lost``: of the row's largest value."""
    tokens, k = 11, 256
    x = rows_of(tokens, k)
    codes, scales = quantise(x, None, dtype, exact=True, folder=tmp_path)
    parts = codes.reshape(-1, 2, 8, k)
    if dtype == "int8":
        values = 256.0 * parts[:, 0].view(np.int8) + parts[:, 1].view(np.int8)
    else:
        values = E4M3[parts[:, 0]] + E4M3[parts[:, 1]] / 16
    seen = scales[:, None].astype(np.float64) * values.reshape(-1, k)[:tokens]
    assert (np.abs(seen - x) <= lost * np.abs(x).max(axis=1, keepdims=True)).all()
    if dtype == "fp8":
        large = np.abs(x) >= 2.0**-13 * np.abs(x).max(axis=1, keepdims=True)
        assert (seen == x)[large].all()
