"""Block types: dequantise as ggml does, quantise within half a step, repack honestly."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from pelton.dtypes import BLOCK_TYPES, GGUF_BLOCK_TYPES
from pelton.ir.block_encoder import ENCODED, quantize
from pelton.ir.blocks import dequantize
from pelton.ir.tensors import HostTensor, bf16_to_f32, f32_to_bf16
from pelton.quant.repack import EQUAL, repack

#: Byte offsets of the float16 fields of each block: random bytes there could be NaN or infinity.
HALF_FIELDS = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
}


def random_blocks(quant: str, rows: int, blocks_per_row: int, seed: int = 0) -> HostTensor:
    """Every bit random except that scales are finite."""
    block = BLOCK_TYPES[quant]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows * blocks_per_row, block.block_bytes), dtype=np.uint8)
    for at in HALF_FIELDS[quant]:
        half = rng.standard_normal((len(data), 1)).astype(np.float16)
        data[:, at : at + 2] = half.view(np.uint8)
    return HostTensor(quant, (rows, blocks_per_row * block.block_size), data.reshape(rows, -1))


def ggml_type(quant: str) -> GGMLQuantizationType:
    return GGMLQuantizationType[quant.upper()]


@pytest.mark.parametrize("quant", GGUF_BLOCK_TYPES)
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (40, 2)])
def test_dequantised_blocks_equal_ggml_bit_for_bit(quant: str, shape: tuple[int, int]) -> None:
    tensor = random_blocks(quant, *shape)
    expected = gguf.dequantize(tensor.data, ggml_type(quant))
    np.testing.assert_array_equal(dequantize(tensor), expected)


@pytest.mark.parametrize("quant", GGUF_BLOCK_TYPES)
def test_a_tensor_larger_than_one_chunk_dequantises_as_its_rows_do(
    quant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = random_blocks(quant, 9, 2)
    whole = dequantize(tensor)
    monkeypatch.setattr("pelton.ir.blocks._CHUNK_VALUES", 2 * tensor.shape[1])
    np.testing.assert_array_equal(dequantize(tensor), whole)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dense_values_dequantise_to_themselves(dtype: str) -> None:
    values = np.array([[1.5, -2.0, 0.0, 65504.0]], np.float32)
    data = f32_to_bf16(values) if dtype == "bfloat16" else values.astype(dtype)
    out = dequantize(HostTensor(dtype, values.shape, data))
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, values, rtol=0 if dtype != "bfloat16" else 2**-8)


#: Largest error of a value in units of its block's range / codes; K types share rounded 6- or 8-bit
#: scales between sub-blocks, which costs up to one more part of the range.
STEPS = {"q4_0": 1 / 8, "q4_1": 1 / 30, "q5_0": 1 / 16, "q5_1": 1 / 62, "q8_0": 1 / 254, "q2_k": 1 / 3}
STEPS |= {"q3_k": 1 / 4, "q4_k": 1 / 15, "q5_k": 1 / 31, "q6_k": 1 / 32}


@pytest.mark.parametrize("quant", ENCODED)
@pytest.mark.parametrize("scale", [2e-2, 1.0, 300.0])
def test_quantised_values_are_within_a_step(quant: str, scale: float) -> None:
    x = np.random.default_rng(1).standard_normal((6, 512)).astype(np.float32) * np.float32(scale)
    tensor = quantize(x, quant)
    assert tensor.data.shape == (6, 512 // BLOCK_TYPES[quant].block_size * BLOCK_TYPES[quant].block_bytes)
    blocks = (
        x.reshape(-1, BLOCK_TYPES[quant].block_size),
        dequantize(tensor).reshape(-1, BLOCK_TYPES[quant].block_size),
    )
    spread = blocks[0].max(axis=1) - blocks[0].min(axis=1)
    if quant in ("q4_0", "q5_0", "q8_0", "q3_k", "q6_k"):
        spread = np.abs(blocks[0]).max(axis=1)
    error = np.abs(blocks[0] - blocks[1]).max(axis=1)
    assert (error <= spread * STEPS[quant] * 1.02).all()


@pytest.mark.parametrize("quant", ["q4_0", "q4_1", "q5_0", "q8_0"])
def test_quantise_agrees_with_ggmls_encoder_on_error(quant: str) -> None:
    """Not the same bits (ours rounds codes to the stored scale), but never a worse error."""
    x = np.random.default_rng(2).standard_normal((16, 256)).astype(np.float32)
    theirs = gguf.dequantize(gguf.quantize(x, ggml_type(quant)), ggml_type(quant))
    ours = dequantize(quantize(x, quant))
    assert np.square(ours - x).sum() <= np.square(theirs - x).sum() * 1.001


@pytest.mark.parametrize("quant", ENCODED)
def test_zeros_and_constants_quantise(quant: str) -> None:
    np.testing.assert_array_equal(dequantize(quantize(np.zeros((2, 256), np.float32), quant)), 0)
    for value in (1.0, -1.0):
        x = np.full((2, 256), value, np.float32)
        np.testing.assert_allclose(dequantize(quantize(x, quant)), x, rtol=2e-2)


@pytest.mark.parametrize("quant", ENCODED)
def test_quantising_dequantised_values_again_changes_nothing_much(quant: str) -> None:
    x = np.random.default_rng(3).standard_normal((4, 256)).astype(np.float32)
    once = dequantize(quantize(x, quant))
    twice = dequantize(quantize(once, quant))
    assert np.abs(twice - once).max() <= np.abs(x).max() * STEPS[quant]


def test_repack_leaves_dense_tensors_and_its_own_type_alone() -> None:
    dense = HostTensor("float32", (2, 4), np.ones((2, 4), np.float32))
    assert repack(dense, "q8_0") == (dense, "")
    for quant in ENCODED:
        tensor = random_blocks(quant, 2, 1)
        packed, note = repack(tensor, quant)
        assert packed is tensor
        assert note == ""


@pytest.mark.parametrize("quant", ["q5_1", "q2_k", "q3_k", "q5_k"])
def test_other_types_repack_to_q8_0_with_their_measured_error(quant: str) -> None:
    tensor = random_blocks(quant, 8, 2)
    packed, note = repack(tensor, "q8_0")
    before, after = dequantize(tensor), dequantize(packed)
    relative = np.linalg.norm(after - before) / np.linalg.norm(before)
    assert 0 < relative < 1e-2
    assert note == f"{quant} repacked as q8_0, relative error {relative:.1e}"


def test_bfloat16_rounds_to_nearest_even_and_keeps_specials() -> None:
    torch = pytest.importorskip("torch")
    bits = np.random.default_rng(4).integers(0, 2**32, 20000, dtype=np.uint32)
    values = bits.view(np.float32)
    expected = torch.from_numpy(values.copy()).bfloat16().float().numpy()
    np.testing.assert_array_equal(bf16_to_f32(f32_to_bf16(values)), expected)
    np.testing.assert_array_equal(
        bf16_to_f32(f32_to_bf16(np.array([np.inf, -np.inf, 0.0, -0.0], np.float32))), [np.inf, -np.inf, 0, 0]
    )


@pytest.mark.parametrize("quant", sorted(EQUAL))
def test_types_of_other_names_hold_the_same_values(quant: str) -> None:
    tensor = quantize(np.random.default_rng(3).standard_normal((5, 96)).astype(np.float32), quant)
    same, note = repack(tensor, EQUAL[quant])
    assert (same.quant, note) == (EQUAL[quant], "")
    assert np.array_equal(dequantize(same), dequantize(tensor))
