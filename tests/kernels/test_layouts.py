"""Weight layouts are lossless and place bytes as documented."""

from __future__ import annotations

import numpy as np
import pytest

from pelton.dtypes import BLOCK_TYPES, GPU_BLOCK_TYPES, GROUP_BLOCK_TYPES, NATIVE_BLOCK_TYPES, is_dense
from pelton.errors import ConfigError
from pelton.ir import blocks, group_blocks
from pelton.ir.tensors import HostTensor
from pelton.kernels.gpu_rows8 import PADDING
from pelton.kernels.layouts import LAYOUTS

DENSE = ("float32", "bfloat16", "float16")
BLOCK = NATIVE_BLOCK_TYPES
#: Layouts with the value types that they hold.
HELD = [(layout, quant) for layout in ("rows", "x16") for quant in DENSE + BLOCK]
HELD += [("mma16", quant) for quant in GPU_BLOCK_TYPES]
HELD += [("rows8", quant) for quant in ("int8_row", "fp8_row", "fp8_g128")]
SHAPES = ((16, 256), (1, 512), (33, 256), (48, 768))


def random_tensor(quant: str, shape: tuple[int, int], seed: int = 0) -> HostTensor:
    """Random bits: every representable pattern, except that scales are finite."""
    rng = np.random.default_rng(seed)
    rows, cols = shape
    if is_dense(quant):
        values = rng.standard_normal(shape).astype(np.float32)
        if quant == "bfloat16":
            return HostTensor(quant, shape, (values.view(np.uint32) >> 16).astype(np.uint16))
        return HostTensor(quant, shape, values.astype(quant))
    header = BLOCK_TYPES[quant].header
    raw = rng.integers(0, 256, (rows, BLOCK_TYPES[quant].row_bytes(cols)), dtype=np.uint8)
    if header:
        if quant == "nvfp4":  # its e4m3 scales
            raw[:, header::9] &= 0x77
        raw[:, :header] = rng.standard_normal((rows, 1)).astype(np.float32).view(np.uint8)
        return HostTensor(quant, shape, raw)
    view = blocks.blocks_view(raw, quant)
    if quant in GROUP_BLOCK_TYPES:
        for field in {"d", "s"} & set(view.dtype.names):
            view[field] = (
                rng.standard_normal(view.shape) if field == "d" else rng.integers(1, 120, view.shape)
            )
        return HostTensor(quant, shape, raw)
    for field in ("d", "m", "dmin"):
        if field in view.dtype.names:
            view[field] = rng.standard_normal(view.shape).astype(np.float16).view(np.uint16)
    return HostTensor(quant, shape, raw)


def test_every_layout_is_tested() -> None:
    assert {layout for layout, _ in HELD} == set(LAYOUTS)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("layout", "quant"), HELD)
def test_packing_is_lossless(layout: str, quant: str, shape: tuple[int, int]) -> None:
    tensor = random_tensor(quant, shape)
    packed = LAYOUTS[layout].pack(tensor)
    assert packed.dtype == np.uint8
    assert packed.shape == (LAYOUTS[layout].nbytes(quant, shape),)
    raw = LAYOUTS[layout].to_rows(packed, quant, shape)
    assert np.array_equal(raw, np.ascontiguousarray(tensor.data).view(np.uint8).reshape(shape[0], -1))


@pytest.mark.parametrize(("layout", "quant"), HELD)
def test_unpacking_gives_the_exact_values(layout: str, quant: str) -> None:
    tensor = random_tensor(quant, (35, 512))
    values = LAYOUTS[layout].unpack(LAYOUTS[layout].pack(tensor), quant, tensor.shape)
    if not is_dense(quant):
        want = blocks.dequantize_rows(tensor.data, quant)
    elif quant == "bfloat16":
        want = (tensor.data.astype(np.uint32) << 16).view(np.float32)
    else:
        want = tensor.data.astype(np.float32)
    assert values.dtype == np.float32
    assert np.array_equal(values, want, equal_nan=True)  # e4m3 has NaN


@pytest.mark.parametrize("layout", ["rows", "x16"])
def test_vectors_and_odd_dense_widths_pack(layout: str) -> None:
    for shape in ((5,), (17, 3), (2, 5, 7)):
        data = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        packed = LAYOUTS[layout].pack(HostTensor("float32", shape, data))
        assert np.array_equal(LAYOUTS[layout].unpack(packed, "float32", shape), data)


def test_more_rows_than_one_chunk() -> None:
    tensor = random_tensor("q4_1", (4096 + 48, 64))
    packed = LAYOUTS["x16"].pack(tensor)
    assert np.array_equal(LAYOUTS["x16"].to_rows(packed, "q4_1", tensor.shape), tensor.data)


def test_x16_places_bytes_as_documented() -> None:
    """The layout the kernels read, spelled out for one panel of each family."""
    tensor = random_tensor("q4_1", (16, 64))
    view = blocks.blocks_view(tensor.data, "q4_1")
    packed = LAYOUTS["x16"].pack(tensor)
    scales = packed[:128].view(np.uint16).reshape(2, 2, 16)
    nib = packed[128:].reshape(2, 4, 16, 4)
    for block, row, g, j in ((0, 0, 0, 0), (1, 5, 2, 3), (1, 15, 3, 1)):
        assert scales[block, 0, row] == view["d"][row, block]
        assert scales[block, 1, row] == view["m"][row, block]
        assert nib[block, g, row, j] == view["qs"][row, block, 4 * g + j]
    wide = random_tensor("q6_k", (16, 256))
    q = blocks.q6_k_values(*(blocks.blocks_view(wide.data, "q6_k")[f] for f in ("ql", "qh")))
    area = LAYOUTS["x16"].pack(wide)[320:].reshape(8, 384)
    nib, bits = area[:, :256].reshape(8, 4, 16, 4), area[:, 256:].reshape(8, 2, 16, 4)
    for sub, row, g, j in ((0, 0, 0, 0), (3, 7, 5, 2), (7, 15, 7, 3)):
        low = nib[sub, g % 4, row, j] >> (4 if g >= 4 else 0) & 15
        high = bits[sub, g // 4, row, j] >> 2 * (g % 4) & 3
        assert low | high << 4 == q[row, 0, sub, 4 * g + j]


def test_types_without_native_support_are_named() -> None:
    with pytest.raises(ConfigError, match="q5_k"):
        LAYOUTS["x16"].pack(HostTensor("q5_k", (1, 256), np.zeros((1, 176), np.uint8)))


def test_x16_places_groups_as_documented() -> None:
    tensor = random_tensor("int4_g64", (16, 128))
    packed = LAYOUTS["x16"].pack(tensor)
    q, d, z = group_blocks.codes(tensor)
    assert z is not None
    for group in range(2):
        scales = packed[48 * group : 48 * group + 48]
        assert np.array_equal(scales[:32].view(np.float16), d[:, group].astype(np.float16))
        assert np.array_equal(scales[32:], z[:, group])
    nibbles = packed[128:].reshape(4, 4, 16, 4)
    for row, col in ((0, 0), (3, 37), (15, 127), (7, 90)):
        byte = nibbles[col // 32, col % 32 // 4 % 4, row, col % 4]
        assert q[row, col] == (byte & 15 if col % 32 < 16 else byte >> 4)


def test_x16_lowers_codes_of_eight_bits_to_signed_bytes() -> None:
    tensor = random_tensor("int8_g32", (16, 64))
    packed = LAYOUTS["x16"].pack(tensor)
    q, d, z = group_blocks.codes(tensor)
    assert z is not None
    assert np.array_equal(packed[80:144].view(np.float32), d[:, 1])
    assert np.array_equal(packed[144:160].view(np.int8), z[:, 1].astype(np.int16) - 128)
    codes = packed[192:].view(np.int8).reshape(2, 8, 16, 4)
    assert codes[1, 3, 5, 2] == int(q[5, 32 + 14]) - 128


@pytest.mark.parametrize(("quant", "cols"), [("int4_g32", 96), ("mxfp4", 32), ("nvfp4", 48), ("fp8_row", 37)])
def test_mma16_pads_columns_to_whole_blocks_of_codes(quant: str, cols: int) -> None:
    tensor = random_tensor(quant, (5, cols))
    packed = LAYOUTS["mma16"].pack(tensor)
    assert np.array_equal(LAYOUTS["mma16"].to_rows(packed, quant, tensor.shape), tensor.data)


@pytest.mark.parametrize("quant", ["int4_g64", "int3_g128", "fp8_row", "int8_g32", "nvfp4"])
def test_mma16_places_codes_where_lanes_need_them(quant: str) -> None:
    """The value of row 8 h + g, column 16 s + 8 c + 2 q + e: lane 4 g + q, byte 8 s + 4 c + 2 h + e."""
    tensor = random_tensor(quant, (32, 256))
    codes = group_blocks.codes(tensor)[0]
    panels = LAYOUTS["mma16"].pack(tensor).reshape(2, -1)
    eight = group_blocks.bits_of(quant) == 8
    for row, col in ((0, 0), (9, 13), (31, 255), (22, 70), (5, 97)):
        g, h, c32 = row % 8, row % 16 // 8, col % 32
        s, c, q, e = c32 // 16, c32 % 16 // 8, c32 % 8 // 2, c32 % 2
        block = col // 32 if eight else col // 64
        byte = panels[row // 16, 512 * block + 16 * (4 * g + q) + 8 * s + 4 * c + 2 * h + e]
        assert codes[row, col] == (byte if eight else byte >> 4 * (col % 64 // 32) & 15)


@pytest.mark.parametrize(("quant", "extra"), [("q5_k", 1), ("q6_k", 2)])
def test_mma16_puts_upper_bits_and_integer_scales_where_lanes_need_them(quant: str, extra: int) -> None:
    """Of half n the words 2 s + c; the scales of a row's four groups in a word."""
    tensor = random_tensor(quant, (16, 512))
    b = blocks.blocks_view(tensor.data, quant)
    if quant == "q6_k":
        codes = blocks.q6_k_values(b["ql"], b["qh"]).reshape(16, 512)
    else:
        codes = (blocks.q4_k_values(b["qs"]) | blocks.bit_planes(b["qh"]) << 4).reshape(16, 512)
    panel, width = LAYOUTS["mma16"].pack(tensor), 512 + 128 * extra
    for row, col in ((0, 0), (9, 13), (15, 511), (6, 70), (5, 97)):
        g, h, n, c32 = row % 8, row // 8, col % 64 // 32, col % 32
        s, c, q, e = c32 // 16, c32 % 16 // 8, c32 % 8 // 2, c32 % 2
        block = panel[col // 64 * width :][:width]
        low = block[16 * (4 * g + q) + 8 * s + 4 * c + 2 * h + e] >> 4 * n & 15
        word = block[512 + 4 * extra * (4 * g + q) :][: 4 * extra]
        bits = (
            word[2 * h + e] >> 4 * n + 2 * s + c & 1
            if extra == 1
            else word[4 * n + 2 * h + e] >> 4 * s + 2 * c & 3
        )
        assert codes[row, col] == low | bits << 4
    areas = panel[8 * width :].reshape(4, -1)
    for row, half in ((3, 0), (14, 3)):
        if quant == "q6_k":
            assert areas[half, 2 * row : 2 * row + 2].view("<u2") == b["d"][row, half // 2]
            at, want = 32 + 64 + 4 * row, b["scales"][row, half // 2, half % 2 * 8 + 4 :][:4].view(np.uint8)
        else:
            at, want = (
                64 + 64 + 4 * row,
                blocks.q4_k_scales(b["scales"])[1][row, half // 2, half % 2 * 4 :][:4],
            )
        assert np.array_equal(areas[half, at : at + 4], want)


def test_mma16_puts_a_groups_scales_and_zero_points_together() -> None:
    tensor = random_tensor("int4_g64", (16, 192))
    _, d, z = group_blocks.codes(tensor)
    assert z is not None
    area = LAYOUTS["mma16"].pack(tensor)[3 * 512 :].reshape(3, 48)
    for group in range(3):
        assert np.array_equal(area[group, :32].view(np.float16), d[:, group].astype(np.float16))
        assert np.array_equal(area[group, 32:], z[:, group])


def test_rows8_puts_codes_in_rows_of_whole_16_bytes_and_scales_behind_them() -> None:
    tensor = random_tensor("fp8_row", (5, 100))
    codes, d, _ = group_blocks.codes(tensor)
    packed = LAYOUTS["rows8"].pack(tensor)
    rows = packed[: 5 * 112].reshape(5, 112)
    assert np.array_equal(rows[:, :100], codes)
    assert not rows[:, 100:].any() and not packed[560:768].any()
    assert np.array_equal(packed[768:].view(np.float32), d.reshape(-1))


def test_rows8_puts_scales_of_all_rows_for_a_group_behind_each_other() -> None:
    tensor = random_tensor("fp8_g128", (5, 384))
    codes, d, _ = group_blocks.codes(tensor)
    packed = LAYOUTS["rows8"].pack(tensor)
    assert np.array_equal(packed[: 5 * 384].reshape(5, 384), codes.reshape(5, 384))
    scales = packed[2048 : 2048 + 60].view(np.float32).reshape(3, 5)
    assert np.array_equal(scales, d.reshape(5, 3).T)
    assert packed.nbytes == 2048 + 60 + PADDING and not packed[2048 + 60 :].any()


@pytest.mark.parametrize(
    ("quant", "cols"), [*(("int8_row", n) for n in (1, 37, 128, 1024)), ("fp8_g128", 128), ("fp8_g128", 384)]
)
@pytest.mark.parametrize("lengths", [(7,), (1, 2, 4), (60, 60, 3), (1,) * 9])
def test_rows8_is_joined_of_pieces_of_any_length(quant: str, cols: int, lengths: tuple[int, ...]) -> None:
    layout, rows = LAYOUTS["rows8"], sum(lengths)
    tensor = random_tensor(quant, (rows, cols))
    ends = np.cumsum(lengths)
    pieces = [
        layout.pack(HostTensor(quant, (n, cols), tensor.data[end - n : end]))
        for n, end in zip(lengths, ends, strict=True)
    ]
    joined = np.concatenate(list(layout.join(pieces, quant, (rows, cols))))
    assert np.array_equal(joined, layout.pack(tensor))


@pytest.mark.parametrize("layout", ["mma16", "rows8"])
def test_layouts_of_gpus_refuse_what_they_do_not_hold(layout: str) -> None:
    for tensor in (random_tensor("q4_0", (16, 32)), HostTensor("float32", (4,), np.zeros(4, np.float32))):
        with pytest.raises(ConfigError, match=layout):
            LAYOUTS[layout].pack(tensor)
