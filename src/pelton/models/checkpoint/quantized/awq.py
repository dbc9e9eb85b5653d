"""AWQ checkpoints as AutoAWQ and GPTQModel write them (quant_method awq), 4 bits: ``scale (code - zero)``.

Of a linear layer with K inputs and N outputs, eight codes in an int32, zero points as they are:

- gemm: qweight (K, N / 8) along the outputs, qzeros (groups, N / 8), scales (groups, N); the nibbles of a
  word hold outputs 0, 2, 4, 6, 1, 3, 5, 7;
- gemv: qweight (N, K / 8) along the inputs, in order; qzeros (N, w) and scales (N, 8 w), groups padded to w
  words;
- gemv_fast: qweight (N / 4, K) int16, four outputs interleaved by 64 inputs; scales (8 w, N) and qzeros
  (8 w, N) float16, the latter ``-scale zero``.

Lin et al. 2023 (AWQ).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from pelton.models.checkpoint.quantized.settings import Settings
from pelton.models.checkpoint.quantized.stored import FLOATS, Array, StoredTensors
from pelton.models.checkpoint.quantized.weight import Integers, IntegerWeight, QuantizedWeight, unpack

VERSIONS = ("gemm", "gemv", "gemv_fast")
_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])
#: Inputs of a row that lie together in gemv_fast, before those of the next of four rows.
_STRIDE = 64


def awq_weights(settings: Settings, stored: StoredTensors) -> Iterator[QuantizedWeight]:
    """Every weight that is stored as a qweight. Raises ``CheckpointError``."""
    version = settings.choice("version", "checkpoint_format", "format", known=VERSIONS, default="gemm")
    settings.integer("bits", "w_bit", among=(4,))
    group_size = settings.integer("group_size", "q_group_size", default=128)
    for name in stored:
        if name.endswith(".qweight"):
            module = name.removesuffix(".qweight")
            weight = _LAYOUTS[version](module, group_size, settings, stored)
            yield QuantizedWeight(
                name=f"{module}.weight",
                parts=tuple(f"{module}.{part}" for part in ("qweight", "qzeros", "scales")),
                shape=weight.shape,
                quant=weight.quant,
                read=weight.read,
            )


def _group(module: str, group_size: int, cols: int, settings: Settings) -> int:
    group = cols if group_size == -1 else group_size
    if group < 1 or cols % group:
        raise settings.wrong("group_size", group_size, f"-1 or a divisor of the {cols} columns of {module}")
    return group


def _gemm(module: str, group_size: int, settings: Settings, stored: StoredTensors) -> IntegerWeight:
    cols, words = stored.need(f"{module}.qweight", ("int32",)).shape
    group = _group(module, group_size, cols, settings)
    stored.need(f"{module}.qzeros", ("int32",), (cols // group, words))
    stored.need(f"{module}.scales", FLOATS, (cols // group, words * 8))

    def outputs(name: str, part: slice) -> Array:
        """Outputs ``part`` of a packed tensor, one a row."""
        first, last = part.start // 8, -(-part.stop // 8)
        packed = unpack(stored.array(name)[:, first:last], 4).reshape(-1, last - first, 8)
        plain = np.empty_like(packed)
        plain[:, :, _ORDER] = packed
        skip = part.start - 8 * first
        return plain.reshape(len(packed), -1)[:, skip : skip + part.stop - part.start].T

    def read_rows(part: slice) -> Integers:
        d = stored.floats(f"{module}.scales")[:, part].T
        return Integers(outputs(f"{module}.qweight", part), d, outputs(f"{module}.qzeros", part))

    return IntegerWeight(shape=(words * 8, cols), bits=4, group=group, start=lambda: read_rows)


def _padded_groups(cols: int, group: int) -> int:
    """Groups of a row with those that pad them: whole words, an even number of them below 128 columns."""
    multiple = {32: 4, 64: 2}.get(group, 1)
    words = -(-(cols // group) // 8)
    return 8 * multiple * -(-words // multiple)


def _gemv(module: str, group_size: int, settings: Settings, stored: StoredTensors) -> IntegerWeight:
    rows, words = stored.need(f"{module}.qweight", ("int32",)).shape
    cols = words * 8
    group = _group(module, group_size, cols, settings)
    padded = _padded_groups(cols, group)
    stored.need(f"{module}.qzeros", ("int32",), (rows, padded // 8))
    stored.need(f"{module}.scales", FLOATS, (rows, padded))

    def read_rows(part: slice) -> Integers:
        return Integers(
            unpack(stored.array(f"{module}.qweight")[part], 4),
            stored.floats(f"{module}.scales")[part, : cols // group],
            unpack(stored.array(f"{module}.qzeros")[part], 4)[:, : cols // group],
        )

    return IntegerWeight(shape=(rows, cols), bits=4, group=group, start=lambda: read_rows)


def _gemv_fast(module: str, group_size: int, settings: Settings, stored: StoredTensors) -> IntegerWeight:
    quarter, cols = stored.need(f"{module}.qweight", ("int16",)).shape
    rows = quarter * 4
    group = _group(module, group_size, cols, settings)
    padded = _padded_groups(cols, group)
    stored.need(f"{module}.scales", FLOATS, (padded, rows))
    stored.need(f"{module}.qzeros", FLOATS, (padded, rows))
    if cols % _STRIDE:
        raise stored.wrong(f"has {module}.qweight of {cols} columns, not a multiple of {_STRIDE}")

    def read_rows(part: slice) -> Integers:
        first, last = part.start // 4, -(-part.stop // 4)
        # 16-bit word: nibble r of place p of row r.. (four rows, cols / 64, 64) -> (rows, cols).
        nibbles = unpack(stored.array(f"{module}.qweight")[first:last], 4)
        tiles = nibbles.reshape(last - first, cols // _STRIDE, 4, _STRIDE)
        q = tiles.swapaxes(1, 2).reshape(-1, cols // 32, 32)
        d = stored.floats(f"{module}.scales")[: cols // group, part].T
        shift = stored.floats(f"{module}.qzeros")[: cols // group, part].T
        z = np.rint(-shift / np.where(d == 0, 1, d))
        skip = part.start - 4 * first
        codes = q[:, :, _fast_places()].reshape(-1, cols)[skip : skip + part.stop - part.start]
        return Integers(codes, d, z.astype(np.uint8))

    return IntegerWeight(shape=(rows, cols), bits=4, group=group, start=lambda: read_rows)


def _fast_places() -> Array:
    """Of 32 inputs of a row, where gemv_fast keeps each.

    Pairs (a, b, i), input 8 a + 2 b + i, are stored as (b, a, i); then of each eight the even places
    before the odd ones.
    """
    inputs = np.arange(32).reshape(4, 4, 2).transpose(1, 0, 2).reshape(4, 4, 2).swapaxes(1, 2).reshape(32)
    places = np.empty(32, int)
    places[inputs] = np.arange(32)
    return places


_LAYOUTS: dict[str, Callable[[str, int, Settings, StoredTensors], IntegerWeight]] = {
    "gemm": _gemm,
    "gemv": _gemv,
    "gemv_fast": _gemv_fast,
}
