"""The native linear and embedding kernels, at every ISA level this CPU has, against exact values."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pelton.dtypes import BLOCK_TYPES, NATIVE_BLOCK_TYPES, is_dense
from pelton.ir.block_encoder import quantize
from pelton.ir.blocks import blocks_view, dequantize
from pelton.ir.tensors import HostTensor
from pelton.kernels import native
from pelton.kernels.layouts import LAYOUTS
from pelton.kernels.linear.workspace import int8_bytes

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the native library (make native)")

BLOCK = NATIVE_BLOCK_TYPES
DENSE = ("float32", "bfloat16", "float16")
LEVELS = ("generic", "avx2", "avxvnni", "avx512")


@pytest.fixture(scope="module")
def team() -> Iterator[native.Team]:
    with native.Team(2) as t:
        yield t


def levels_of(kernel: str) -> tuple[str, ...]:
    return native.kernel_levels().get(kernel, ())


def weight(quant: str, rows: int, cols: int, seed: int = 0) -> tuple[HostTensor, np.ndarray]:
    """A weight as checkpoints hold it, and its exact values."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((rows, cols)) * cols**-0.5).astype(np.float32)
    if not is_dense(quant):
        tensor = quantize(values, quant)
        return tensor, dequantize(tensor)
    if quant == "bfloat16":
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        return HostTensor(quant, (rows, cols), bits), (bits.astype(np.uint32) << 16).view(np.float32)
    data = values.astype(quant)
    return HostTensor(quant, (rows, cols), data), data.astype(np.float32)


def packed(tensor: HostTensor, layout: str = "x16") -> native.NativeTensor:
    data = native.aligned_empty(LAYOUTS[layout].nbytes(tensor.quant, tensor.shape))
    data[:] = LAYOUTS[layout].pack(tensor)
    return native.NativeTensor(data, "uint8", tensor.shape)


def int8_activations(x: np.ndarray) -> np.ndarray:
    """What the int8 kernels make of x: per token and 32 columns, d = max|x| / 127, rounded."""
    b = x.reshape(len(x), -1, 32)
    top = np.abs(b).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    return (np.rint(b * inverse) * (top / np.float32(127))).astype(np.float32).reshape(x.shape)


def linear(
    team: native.Team,
    kernel: str,
    x: np.ndarray,
    w: native.NativeTensor,
    bias: np.ndarray | None = None,
    level: str | None = None,
) -> np.ndarray:
    """Runs into a wider buffer whose margins must stay untouched."""
    rows, cols = w.shape
    wide = np.full((len(x) + 2, rows + 24), 777, np.float32)
    out = wide[1 : len(x) + 1, 8 : 8 + rows]
    team.run(kernel, [x, w, bias], [out], level=level, workspace_bytes=int8_bytes(len(x), cols))
    result = out.copy()
    out[:] = 777
    assert (wide == 777).all(), "wrote outside its output"
    return result


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-30))


SHAPES = [(1, 33, 256), (2, 16, 512), (3, 17, 256), (5, 40, 768), (8, 1, 256), (9, 50, 1280), (33, 31, 2304)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("quant", BLOCK)
def test_int8_products_are_those_of_the_rounded_activations(
    team: native.Team, quant: str, level: str
) -> None:
    kernel = f"cpu.linear.{quant}.x16.int8"
    if level not in levels_of(kernel):
        pytest.skip(f"this CPU lacks {level}")
    rng = np.random.default_rng(1)
    for tokens, rows, cols in SHAPES:
        tensor, values = weight(quant, rows, cols)
        x = rng.standard_normal((tokens, cols)).astype(np.float32) + 0.5
        bias = rng.standard_normal(rows).astype(np.float32) if rows % 2 else None
        want = int8_activations(x).astype(np.float64) @ values.T.astype(np.float64)
        want = want if bias is None else want + bias
        got = linear(team, kernel, x, packed(tensor), bias, level)
        assert relative_error(got, want) < 5e-6, (tokens, rows, cols)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("quant", BLOCK + DENSE)
def test_float32_products_are_exact(team: native.Team, quant: str, level: str) -> None:
    kernel = f"cpu.linear.{quant}.x16" + ("" if is_dense(quant) else ".f32")
    if level not in levels_of(kernel):
        pytest.skip(f"this CPU has no {kernel} at {level}")
    rng = np.random.default_rng(2)
    odd = [(1, 5, 7), (7, 19, 33), (13, 16, 1)] if is_dense(quant) else []
    for tokens, rows, cols in SHAPES + odd:
        tensor, values = weight(quant, rows, cols)
        x = rng.standard_normal((tokens, cols)).astype(np.float32)
        bias = rng.standard_normal(rows).astype(np.float32) if rows % 2 else None
        want = x.astype(np.float64) @ values.T.astype(np.float64)
        want = want if bias is None else want + bias
        assert relative_error(linear(team, kernel, x, packed(tensor), bias, level), want) < 3e-6


@pytest.mark.parametrize("quant", BLOCK)
def test_extreme_weights_and_activations_do_not_overflow(team: native.Team, quant: str) -> None:
    """All bits set or clear, against activations of one sign: the largest integer sums there are."""
    for fill in (0x00, 0xFF, 0x7F, 0x80):
        tensor, _ = weight(quant, 16, 256)
        header = BLOCK_TYPES[quant].header
        tensor.data[:, header:] = fill if header else tensor.data
        view = blocks_view(tensor.data[:, header:], quant)
        for field in () if header else ("qs", "qh", "ql"):
            if field in view.dtype.names:
                view[field] = np.array(fill, np.uint8).astype(view.dtype[field].base, casting="unsafe")
        values = dequantize(tensor)
        for sign in (1, -1):
            x = np.full((5, 256), sign * 3.0, np.float32)
            want = x @ values.T
            for level in levels_of(f"cpu.linear.{quant}.x16.int8"):
                got = linear(team, f"cpu.linear.{quant}.x16.int8", x, packed(tensor), None, level)
                assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("quant", BLOCK + DENSE)
def test_a_row_does_not_depend_on_the_others(team: native.Team, quant: str, level: str) -> None:
    x = np.random.default_rng(3).standard_normal((29, 1536)).astype(np.float32)
    tensor, _ = weight(quant, 40, 1536)
    w = packed(tensor)
    for suffix in ("",) if is_dense(quant) else (".int8", ".f32"):
        kernel = f"cpu.linear.{quant}.x16{suffix}"
        if level not in levels_of(kernel):
            continue
        alone = np.concatenate([linear(team, kernel, x[i : i + 1], w, None, level) for i in range(len(x))])
        for n in (2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 29):
            assert np.array_equal(linear(team, kernel, x[:n], w, None, level), alone[:n]), n


def test_levels_agree_bit_for_bit_where_they_use_the_same_operations(team: native.Team) -> None:
    x = np.random.default_rng(4).standard_normal((9, 768)).astype(np.float32)
    for quant in BLOCK:
        kernel = f"cpu.linear.{quant}.x16.int8"
        w = packed(weight(quant, 48, 768)[0])
        results = [linear(team, kernel, x, w, None, v) for v in levels_of(kernel) if v != "generic"]
        assert all(np.array_equal(r, results[0]) for r in results)


def test_strided_inputs_and_zeros(team: native.Team) -> None:
    wide = np.random.default_rng(5).standard_normal((11, 700)).astype(np.float32)
    for quant in ("q4_1", "q8_0", "float32"):
        kernel = f"cpu.linear.{quant}.x16" + ("" if is_dense(quant) else ".int8")
        w = packed(weight(quant, 32, 256)[0])
        got = linear(team, kernel, wide[:, 100:356], w)
        assert np.array_equal(got, linear(team, kernel, np.ascontiguousarray(wide[:, 100:356]), w))
        assert not linear(team, kernel, np.zeros((3, 256), np.float32), w).any()


@pytest.mark.parametrize("quant", BLOCK)
def test_values_that_are_not_finite_show(team: native.Team, quant: str) -> None:
    """A NaN must not be lost by rounding to int8: it marks its own token and no other."""
    w = packed(weight(quant, 16, 256)[0])
    for bad in (np.nan, np.inf, -np.inf):
        x = np.ones((6, 256), np.float32)
        x[2, 77] = bad
        for suffix in ("int8", "f32"):
            got = linear(team, f"cpu.linear.{quant}.x16.{suffix}", x, w)
            assert not np.isfinite(got[2]).any()
            assert np.isfinite(np.delete(got, 2, 0)).all()


@pytest.mark.parametrize("layout", ["rows", "x16"])
@pytest.mark.parametrize("quant", BLOCK + DENSE)
def test_embedding_reads_the_exact_values(team: native.Team, quant: str, layout: str) -> None:
    tensor, values = weight(quant, 37, 512)
    ids = np.array([0, 36, 5, 5, 16, 15, 31], np.int32)
    out = np.full((7, 512), 777, np.float32)
    team.run(f"cpu.embedding.{quant}.{layout}", [ids, packed(tensor, layout)], [out])
    assert np.array_equal(out, values[ids])


def test_an_id_outside_the_table_gives_nan(team: native.Team) -> None:
    out = np.zeros((3, 64), np.float32)
    w = packed(weight("float32", 5, 64)[0])
    team.run("cpu.embedding.float32.x16", [np.array([5, 1, -1], np.int32), w], [out])
    assert np.isnan(out[[0, 2]]).all()
    assert np.isfinite(out[1]).all()
