"""The block types of other quantisers: codes and values against definitions written by hand or torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pelton.dtypes import BLOCK_TYPES, GROUP_BLOCK_TYPES
from pelton.ir import group_blocks
from pelton.ir.block_encoder import quantize
from pelton.ir.blocks import dequantize, scales
from pelton.ir.evaluate import evaluate
from pelton.ir.group_encoder import encode, integer_codes, integer_scales
from pelton.ir.recipe import Concat, PadRows, Rows, Source
from pelton.ir.tensors import HostTensor
from pelton.models.checkpoint.base import count_non_finite

INTEGERS = [quant for quant in GROUP_BLOCK_TYPES if quant.startswith("int")]


def test_e4m3_is_torchs() -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(group_blocks.E4M3, expected)


@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_rounding_to_e4m3_is_torchs(spread: float) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(50_000) * np.exp(rng.standard_normal(50_000) * spread)
    x = np.concatenate([x, group_blocks.E4M3[:127], (group_blocks.E4M3[:126] + group_blocks.E4M3[1:127]) / 2])
    x = np.clip(x, -448, 448).astype(np.float32)
    expected = torch.tensor(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(group_blocks.to_e4m3(x), expected)
    assert group_blocks.E4M3[group_blocks.to_e4m3(np.array([1e9, -1e9]))].tolist() == [448, -448]
    assert np.isnan(group_blocks.E4M3[group_blocks.to_e4m3(np.array([np.nan]))]).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_packed_codes_come_back(bits: int) -> None:
    q = np.random.default_rng(1).integers(0, 1 << bits, (3, 5, 64), dtype=np.uint8)
    packed = group_blocks.pack_bits(q, bits)
    assert packed.shape == (3, 5, 8 * bits)
    np.testing.assert_array_equal(group_blocks.unpack_bits(packed, bits), q)


def test_where_codes_lie() -> None:
    q = np.zeros(32, np.uint8)
    q[1], q[17] = 5, 9
    assert group_blocks.pack_bits(q, 4)[1] == 5 | 9 << 4
    q = np.zeros(32, np.uint8)
    q[3], q[3 + 8], q[3 + 24] = 1, 2, 3
    assert group_blocks.pack_bits(q, 2)[3] == 1 | 2 << 2 | 3 << 6
    q = np.zeros(32, np.uint8)
    q[9] = 6
    assert group_blocks.pack_bits(q, 3).tolist() == [0, 2 << 2, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0]


@pytest.mark.parametrize("quant", [q for q in INTEGERS if q != "int8_row"])
def test_integer_groups_are_scale_times_code_minus_zero(quant: str) -> None:
    bits, size = group_blocks.bits_of(quant), group_blocks.group_of(quant)
    rng = np.random.default_rng(2)
    q = rng.integers(0, 1 << bits, (3, 2 * size), dtype=np.uint8)
    z = rng.integers(0, 1 << bits, (3, 2), dtype=np.uint8)
    d = rng.standard_normal((3, 2)).astype(np.float16)
    tensor = group_blocks.from_codes(quant, q, d, z)
    expected = np.empty(q.shape, np.float32)
    for row in range(3):
        for col in range(2 * size):
            group = col // size
            expected[row, col] = np.float32(d[row, group]) * (int(q[row, col]) - int(z[row, group]))
    np.testing.assert_array_equal(dequantize(tensor), expected)
    again, d2, z2 = group_blocks.codes(tensor)
    assert z2 is not None
    np.testing.assert_array_equal(again, q)
    np.testing.assert_array_equal(d2, d.astype(np.float32))
    np.testing.assert_array_equal(z2, z)


@pytest.mark.parametrize("quant", ["int8_row", "fp8_row", "fp8_g128", "nf4_g64", "fp4_g64"])
def test_codes_come_back_from_scaled_types(quant: str) -> None:
    rng = np.random.default_rng(3)
    q = rng.integers(0, 1 << group_blocks.bits_of(quant), (4, 256), dtype=np.uint8)
    groups = 256 // (group_blocks.group_of(quant) or 256)
    d = rng.standard_normal((4, groups)).astype(np.float32)
    tensor = group_blocks.from_codes(quant, q, d)
    assert tensor.data.shape == (4, BLOCK_TYPES[quant].row_bytes(256))
    again, d2, z = group_blocks.codes(tensor)
    assert z is None
    np.testing.assert_array_equal(again, q)
    np.testing.assert_array_equal(d2, d)


#: Largest error over the group's largest magnitude (asymmetric integers: over its range), plain rounding.
ERROR = {
    "int8_row": 1 / 254,
    "fp8_row": 1 / 28,
    "fp8_g128": 1 / 28,
    "nf4_g64": 0.16,
    "fp4_g64": 1 / 6 + 1e-6,
    "nvfp4": 0.21,
    "mxfp4": 0.26,
}


@pytest.mark.parametrize("quant", GROUP_BLOCK_TYPES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("symmetric", [False, True])
def test_rounding_errors_are_within_a_step(quant: str, scale: float, symmetric: bool) -> None:
    x = np.random.default_rng(4).standard_normal((6, 512)).astype(np.float32) * np.float32(scale)
    tensor = encode(x, quant, symmetric=symmetric) if symmetric else quantize(x, quant)
    size = group_blocks.group_of(quant) or 512
    grouped, got = x.reshape(-1, size), dequantize(tensor).reshape(-1, size)
    if quant in ERROR:
        bound = np.abs(grouped).max(axis=1) * ERROR[quant]
    elif symmetric:
        bound = np.abs(grouped).max(axis=1) / (2 ** group_blocks.bits_of(quant) - 1)
    else:
        low, high = np.minimum(grouped.min(axis=1), 0), np.maximum(grouped.max(axis=1), 0)
        bound = (high - low) / (2 ** group_blocks.bits_of(quant) - 1)
    assert (np.abs(grouped - got).max(axis=1) <= bound * 1.02).all()


@pytest.mark.parametrize("quant", GROUP_BLOCK_TYPES)
def test_zeros_stay_zeros(quant: str) -> None:
    np.testing.assert_array_equal(dequantize(quantize(np.zeros((2, 256), np.float32), quant)), 0)
    tensor = quantize(np.ones((2, 256), np.float32), quant)
    padded = evaluate(PadRows(Source("w"), 5), lambda name: tensor)
    np.testing.assert_array_equal(dequantize(padded)[2:], 0)


@pytest.mark.parametrize("quant", GROUP_BLOCK_TYPES)
def test_rows_move_whole(quant: str) -> None:
    x = np.random.default_rng(5).standard_normal((6, 256)).astype(np.float32)
    tensor = quantize(x, quant)
    mixed = evaluate(Concat((Rows(Source("w"), 4, 6), Rows(Source("w"), 0, 1))), lambda name: tensor)
    np.testing.assert_array_equal(dequantize(mixed), dequantize(tensor)[[4, 5, 0]])


@pytest.mark.parametrize("quant", GROUP_BLOCK_TYPES)
def test_broken_scales_are_counted(quant: str) -> None:
    tensor = quantize(np.random.default_rng(6).standard_normal((4, 256)).astype(np.float32), quant)
    assert count_non_finite(tensor) == 0
    assert sum(s.size for s in scales(tensor.data, quant)) >= 4
    raw = tensor.data.copy()
    scale = group_blocks.DTYPES[quant].fields or {}
    if quant == "mxfp4":
        nan = np.array([255], np.uint8)  # e8m0's
    else:
        kind = np.dtype("<f4") if BLOCK_TYPES[quant].header else scale["d"][0]
        nan = np.array([np.nan], kind).view(np.uint8)
    raw[2, : len(nan)] = nan
    assert count_non_finite(HostTensor(quant, tensor.shape, raw)) >= 1


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_lower_end_of_a_symmetric_group_never_misses_inwards(bits: int) -> None:
    """Whatever its float16 scale: else the largest weights shrink by half a step on average."""
    x = np.random.default_rng(0).standard_normal((500, 1, 32)).astype(np.float32)
    x[:, 0, 0] = -1.01 * np.abs(x).max(axis=(1, 2))
    d, z = integer_scales(x, bits, symmetric=True)
    codes = integer_codes(x, d, z, bits)
    assert (codes[:, 0, 0] == 0).all()
    assert (d == d.astype(np.float16)).all()
