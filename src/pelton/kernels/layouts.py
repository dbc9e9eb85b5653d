"""How a weight's bytes are arranged for a kernel: named layouts, packed at build, read by kernels.

``rows``  As it is: dense row-major, or GGUF rows of blocks.
``x16``   Panels of 16 output rows, interleaved so that one register holds 16 rows' partial sums; rows
          are padded with zeros to a multiple of 16. A dense panel is ``[k][16]`` elements. A panel of
          block-quantised rows is a *scale area* (rounded up to 64 bytes), then a *quant area*:

| quant | scale area, per block                        | quant area, per 32 columns            |
|-------|----------------------------------------------|---------------------------------------|
| q4_0  | d[16]                                        | nib[4][16][4]                         |
| q4_1  | d[16] m[16]                                  | nib[4][16][4]                         |
| q5_0  | d[16]                                        | nib[4][16][4] bit[16][4]              |
| q8_0  | d[16]                                        | int8[8][16][4]                        |
| q4_k  | d[16] dmin[16] scale[8][16] min[8][16]       | nib[4][16][4] (8 of them per block)   |
| q6_k  | d[16] scale[16][16]                          | nib[4][16][4] bits[2][16][4] (8 ...)  |
| int4_g| d[16] z[16]                                  | nib[4][16][4] (g / 32 of them)        |
| int8_g| d[16] z[16]                                  | int8[8][16][4] (g / 32 of them)       |
| int8_row | d[16], once                               | int8[8][16][4]                        |

d, m, dmin are float16 (d of the 8-bit int types float32), q4_k's 6-bit scales and minimums widened to a byte,
q6_k's scales int8, z a byte; codes and z of int8_g are 128 less, as signed bytes. With
column k = 4 g + j of the 32: ``int8[g][row][j]``; ``nib[g % 4][row][j]`` holds column group g < 4 in its
low and g >= 4 in its high nibble; ``bit[row][j]`` holds the fifth bit of group g at bit g;
``bits[g / 4][row][j]`` the upper two bits of group g at bit 2 (g % 4). So a 512-bit load is 16 rows times
4 consecutive columns, whatever the type.

``mma16``  Tensor-core fragments, of the block types that GPU kernels read (``gpu_layouts.py``).
``rows8``  Rows of 8-bit codes, then the rows' scales, for tensor copies of GPUs (``gpu_rows8.py``).

Every layout is lossless: ``to_rows(pack(t))`` gives back the checkpoint's bytes. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pelton.dtypes import BLOCK_TYPES, GROUP_BLOCK_TYPES, GROUP_SIZES, ITEMSIZE, is_dense
from pelton.errors import ConfigError
from pelton.ir import blocks
from pelton.ir.group_blocks import bits_of, pack_bits, unpack_bits
from pelton.ir.tensors import HostTensor, bf16_to_f32
from pelton.kernels.gpu_layouts import Mma16Layout
from pelton.kernels.gpu_rows8 import Rows8Layout
from pelton.registry import Registry

Array = npt.NDArray[Any]
UInt8 = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]
Shape = tuple[int, ...]

PANEL_ROWS = 16
#: Rows packed at a time, so that temporaries stay small beside the result.
_CHUNK_ROWS = 2048


class Layout(Protocol):
    """One arrangement of a weight's bytes. ``shape`` is the logical (rows, cols) of its values."""

    name: str
    panel_rows: int
    """Rows that are packed together: a weight may be packed in pieces of whole panels (``join``)."""

    def nbytes(self, quant: str, shape: Shape) -> int:
        """Bytes of a packed weight."""
        ...

    def pack(self, tensor: HostTensor) -> UInt8:
        """The packed weight, one-dimensional."""
        ...

    def join(self, pieces: Iterable[UInt8], quant: str, shape: Shape) -> Iterator[UInt8]:
        """The bytes of a whole weight, in order, from those of its packed pieces, in order."""
        ...

    def to_rows(self, data: UInt8, quant: str, shape: Shape) -> UInt8:
        """Undo ``pack``: (rows, bytes of a row) as the checkpoint holds them."""
        ...

    def unpack(self, data: UInt8, quant: str, shape: Shape) -> Float32:
        """The exact values, float32, in the logical shape."""
        ...


def row_bytes(quant: str, cols: int) -> int:
    """Bytes of one unpacked row."""
    if is_dense(quant):
        return cols * ITEMSIZE[quant]
    return BLOCK_TYPES[quant].row_bytes(cols)


def _matrix(shape: Shape) -> tuple[int, int]:
    """``shape`` as (rows, cols): the last axis is a row."""
    cols = shape[-1] if shape else 1
    return (int(np.prod(shape[:-1], dtype=np.int64)) if shape else 1), cols


def _raw(tensor: HostTensor) -> UInt8:
    rows, cols = _matrix(tensor.shape)
    return np.ascontiguousarray(tensor.data).view(np.uint8).reshape(rows, row_bytes(tensor.quant, cols))


def _values(raw: UInt8, quant: str, shape: Shape) -> Float32:
    if not is_dense(quant):
        return blocks.dequantize_rows(raw, quant).reshape(shape)
    if quant == "bfloat16":
        return bf16_to_f32(raw).reshape(shape)
    return raw.view(quant).astype(np.float32, copy=False).reshape(shape)


class RowsLayout:
    """``rows``: the checkpoint's own order."""

    name = "rows"
    panel_rows = 1

    def nbytes(self, quant: str, shape: Shape) -> int:
        rows, cols = _matrix(shape)
        return rows * row_bytes(quant, cols)

    def pack(self, tensor: HostTensor) -> UInt8:
        return _raw(tensor).reshape(-1)

    def join(self, pieces: Iterable[UInt8], quant: str, shape: Shape) -> Iterator[UInt8]:
        yield from pieces

    def to_rows(self, data: UInt8, quant: str, shape: Shape) -> UInt8:
        rows, cols = _matrix(shape)
        return data[: self.nbytes(quant, shape)].reshape(rows, row_bytes(quant, cols))

    def unpack(self, data: UInt8, quant: str, shape: Shape) -> Float32:
        return _values(self.to_rows(data, quant, shape), quant, shape)


def _interleave(fields: Array) -> Array:
    """(panels * 16, blocks, ...) -> (panels, blocks, ..., 16), contiguous."""
    panels = fields.reshape(-1, PANEL_ROWS, *fields.shape[1:])
    return np.ascontiguousarray(np.moveaxis(panels, 1, -1))


def _deinterleave(fields: Array) -> Array:
    """Inverse of ``_interleave``."""
    panels = np.moveaxis(fields, -1, 1)
    return np.ascontiguousarray(panels).reshape(-1, *panels.shape[2:])


def _words(values: Array) -> Array:
    """(..., 4 n) bytes -> (..., n) 32-bit words: four consecutive columns travel together."""
    return np.ascontiguousarray(values).view(np.uint32)


def _fifth_bit_words(qh: Array) -> Array:
    """q5_0's ``qh`` (..., 4) -> (..., 1): byte j, bit g is the fifth bit of column 4 g + j."""
    bits = blocks.fifth_bits(qh).reshape(*qh.shape[:-1], 8, 4)
    return _words(np.packbits(np.swapaxes(bits, -1, -2), axis=-1, bitorder="little")[..., 0])


def _fifth_bits_from(words: Array) -> Array:
    bits = np.unpackbits(words.view(np.uint8)[..., None], axis=-1, bitorder="little")
    ordered = np.swapaxes(bits, -1, -2).reshape(*words.shape[:-1], 32)
    return np.packbits(ordered, axis=-1, bitorder="little")


_SHIFTS = np.array([0, 2, 4, 6], np.uint8)[:, None]


def _two_bit_words(high: Array) -> Array:
    """(..., 32) of 0 to 3 -> (..., 2): word g / 4, byte j, bits 2 (g % 4) hold column 4 g + j."""
    grouped = high.reshape(*high.shape[:-1], 2, 4, 4) << _SHIFTS
    return _words(np.bitwise_or.reduce(grouped, axis=-2).reshape(*high.shape[:-1], 8))


def _two_bits_from(words: Array) -> Array:
    packed = words.view(np.uint8).reshape(*words.shape[:-1], 2, 1, 4)
    return (packed >> _SHIFTS & 3).reshape(*words.shape[:-1], 32)


_LOWER = np.uint8(0x80)


def _split_groups(raw: UInt8, quant: str) -> tuple[list[Array], list[Array]]:
    header = BLOCK_TYPES[quant].header
    b = np.ascontiguousarray(raw[:, header:]).view(blocks.BLOCK_DTYPES[quant])
    if quant == "int8_row":
        d = np.ascontiguousarray(raw[:, :header]).view("<u4")
        return [d[..., None]], [_words(b["qs"].reshape(len(b), -1, 32))]
    d, z = b["d"].view(f"<u{b['d'].dtype.itemsize}"), b["z"]
    codes = unpack_bits(b["qs"], bits_of(quant)).reshape(len(b), -1, 32)
    if bits_of(quant) == 8:
        return [d[..., None], (z ^ _LOWER)[..., None]], [_words(codes ^ _LOWER)]
    return [d[..., None], z[..., None]], [_words(blocks.pack_nibbles(codes))]


def _join_groups(scales: list[Array], words: list[Array], quant: str, out: UInt8) -> None:
    """Inverse of ``_split_groups``."""
    header = BLOCK_TYPES[quant].header
    body = np.empty((len(out), (out.shape[1] - header)), np.uint8).view(blocks.BLOCK_DTYPES[quant])
    codes = words[0].view(np.uint8)
    if quant == "int8_row":
        out[:, :header] = np.ascontiguousarray(scales[0][:, 0]).view(np.uint8)
        body["qs"] = codes.view(np.int8).reshape(*body.shape, 1)
    else:
        eight = bits_of(quant) == 8
        body["d"] = scales[0][..., 0].view(body["d"].dtype)
        body["z"] = scales[1][..., 0] ^ _LOWER if eight else scales[1][..., 0]
        codes = codes ^ _LOWER if eight else blocks.nibbles(codes)
        body["qs"] = pack_bits(codes.reshape(*body.shape, -1), bits_of(quant))
    out[:, header:] = body.view(np.uint8).reshape(len(out), -1)


def _scale_blocks(quant: str, cols: int) -> int:
    """Sets of scales of a row."""
    block = BLOCK_TYPES[quant]
    return 1 if block.header else cols // block.block_size


def _split(raw: UInt8, quant: str) -> tuple[list[Array], list[Array]]:
    """Rows of blocks -> scale fields (rows, blocks, n) and words of quants (rows, cols / 32, n)."""
    if quant in GROUP_BLOCK_TYPES:
        return _split_groups(raw, quant)
    b = blocks.blocks_view(raw, quant)
    d = b["d"][..., None]
    if quant == "q8_0":
        return [d], [_words(b["qs"])]
    if quant == "q4_0":
        return [d], [_words(b["qs"])]
    if quant == "q4_1":
        return [d, b["m"][..., None]], [_words(b["qs"])]
    if quant == "q5_0":
        return [d], [_words(b["qs"]), _fifth_bit_words(b["qh"])]
    per_32 = (b.shape[0], b.shape[1] * 8, -1)
    if quant == "q4_k":
        scales, mins = blocks.q4_k_scales(b["scales"])
        nib = _words(blocks.pack_nibbles(blocks.q4_k_values(b["qs"])))
        return [d, b["dmin"][..., None], scales, mins], [nib.reshape(per_32)]
    q = blocks.q6_k_values(b["ql"], b["qh"])
    nib, high = _words(blocks.pack_nibbles(q & 15)), _two_bit_words(q >> 4)
    return [d, b["scales"]], [nib.reshape(per_32), high.reshape(per_32)]


def _join(scales: list[Array], words: list[Array], quant: str, out: UInt8) -> None:
    """Inverse of ``_split``, into ``out`` (rows, bytes)."""
    if quant in GROUP_BLOCK_TYPES:
        _join_groups(scales, words, quant, out)
        return
    b = out.view(blocks.BLOCK_DTYPES[quant])
    b["d"] = scales[0][..., 0]
    bytes_ = words[0].view(np.uint8)
    if quant in ("q8_0", "q4_0", "q4_1", "q5_0"):
        b["qs"] = bytes_.view(np.int8) if quant == "q8_0" else bytes_
        if quant == "q4_1":
            b["m"] = scales[1][..., 0]
        if quant == "q5_0":
            b["qh"] = _fifth_bits_from(words[1])
        return
    low = blocks.nibbles(bytes_).reshape(*b.shape, 8, 32)
    if quant == "q4_k":
        b["dmin"] = scales[1][..., 0]
        b["scales"] = blocks.pack_q4_k_scales(scales[2], scales[3])
        b["qs"] = blocks.pack_q4_k_values(low)
        return
    high = _two_bits_from(words[1]).reshape(*b.shape, 8, 32)
    b["scales"] = scales[1]
    b["ql"], b["qh"] = blocks.pack_q6_k_values(low | high << 4)


class X16Layout:
    """``x16``: 16 rows interleaved (see the module's text)."""

    name = "x16"
    panel_rows = PANEL_ROWS

    #: By block type: scale fields as (element type, count per block), words per 32 columns of quants.
    _FIELDS: dict[str, tuple[list[tuple[str, int]], list[int]]] = {  # noqa: RUF012
        "q4_0": ([("<u2", 1)], [4]),
        "q4_1": ([("<u2", 1), ("<u2", 1)], [4]),
        "q5_0": ([("<u2", 1)], [4, 1]),
        "q8_0": ([("<u2", 1)], [8]),
        "q4_k": ([("<u2", 1), ("<u2", 1), ("u1", 8), ("u1", 8)], [4]),
        "q6_k": ([("<u2", 1), ("i1", 16)], [4, 2]),
        **{f"int4_g{g}": ([("<u2", 1), ("u1", 1)], [4]) for g in GROUP_SIZES},
        **{f"int8_g{g}": ([("<u4", 1), ("u1", 1)], [8]) for g in GROUP_SIZES},
        "int8_row": ([("<u4", 1)], [8]),
    }

    def _areas(self, quant: str, cols: int) -> tuple[int, int, int]:
        """Scale bytes used, scale area, quant area of one panel."""
        if quant not in self._FIELDS:
            known = ", ".join(self._FIELDS)
            raise ConfigError(f"block type {quant!r} has no native layout (known: {known}); repack it first")
        scales, words = self._FIELDS[quant]
        per_block = sum(np.dtype(t).itemsize * n for t, n in scales) * PANEL_ROWS
        used = _scale_blocks(quant, cols) * per_block
        return used, -(-used // 64) * 64, cols // 32 * sum(words) * 4 * PANEL_ROWS

    def panel_bytes(self, quant: str, cols: int) -> int:
        """Bytes of 16 packed rows."""
        if is_dense(quant):
            return cols * ITEMSIZE[quant] * PANEL_ROWS
        row_bytes(quant, cols)
        _, scale_area, quant_area = self._areas(quant, cols)
        return scale_area + quant_area

    def nbytes(self, quant: str, shape: Shape) -> int:
        rows, cols = _matrix(shape)
        return -(-rows // PANEL_ROWS) * self.panel_bytes(quant, cols)

    def _chunks(self, rows: int) -> Iterator[tuple[int, int]]:
        for start in range(0, rows, _CHUNK_ROWS):
            yield start, min(rows, start + _CHUNK_ROWS)

    def pack(self, tensor: HostTensor) -> UInt8:
        raw, quant = _raw(tensor), tensor.quant
        rows, cols = _matrix(tensor.shape)
        out = np.zeros((-(-rows // PANEL_ROWS), self.panel_bytes(quant, cols)), np.uint8)
        for start, stop in self._chunks(rows):
            part = raw[start:stop]
            if padding := -len(part) % PANEL_ROWS:
                part = np.concatenate([part, np.zeros((padding, part.shape[1]), np.uint8)])
            panels = out[start // PANEL_ROWS : -(-stop // PANEL_ROWS)]
            if is_dense(quant):
                panels[:] = self._pack_dense(part, ITEMSIZE[quant])
            else:
                self._pack_blocks(part, quant, cols, panels)
        return out.reshape(-1)

    def _pack_dense(self, part: UInt8, itemsize: int) -> UInt8:
        packed = _interleave(part.view(f"u{itemsize}"))
        return packed.view(np.uint8).reshape(len(packed), -1)

    def _pack_blocks(self, part: UInt8, quant: str, cols: int, panels: UInt8) -> None:
        used, scale_area, _ = self._areas(quant, cols)
        scales, words = _split(part, quant)
        n_blocks = _scale_blocks(quant, cols)
        by_block = [_interleave(s).view(np.uint8).reshape(len(panels), n_blocks, -1) for s in scales]
        by_32 = [_interleave(w).view(np.uint8).reshape(len(panels), cols // 32, -1) for w in words]
        panels[:, :used] = np.concatenate(by_block, axis=-1).reshape(len(panels), -1)
        panels[:, scale_area:] = np.concatenate(by_32, axis=-1).reshape(len(panels), -1)

    def join(self, pieces: Iterable[UInt8], quant: str, shape: Shape) -> Iterator[UInt8]:
        yield from pieces

    def to_rows(self, data: UInt8, quant: str, shape: Shape) -> UInt8:
        rows, cols = _matrix(shape)
        panels = data[: self.nbytes(quant, shape)].reshape(-1, self.panel_bytes(quant, cols))
        out = np.empty((len(panels) * PANEL_ROWS, row_bytes(quant, cols)), np.uint8)
        for start, stop in self._chunks(len(out)):
            part = panels[start // PANEL_ROWS : stop // PANEL_ROWS]
            if is_dense(quant):
                elements = part.reshape(len(part), -1).view(f"u{ITEMSIZE[quant]}")
                wide = _deinterleave(elements.reshape(len(part), cols, PANEL_ROWS))
                out[start:stop] = wide.view(np.uint8)
            else:
                self._unpack_blocks(part, quant, cols, out[start:stop])
        return out[:rows]

    def _unpack_blocks(self, part: UInt8, quant: str, cols: int, out: UInt8) -> None:
        used, scale_area, _ = self._areas(quant, cols)
        scale_fields, word_counts = self._FIELDS[quant]
        n_blocks = _scale_blocks(quant, cols)
        kinds = [*scale_fields, *(("<u4", n) for n in word_counts)]
        by_block = part[:, :used].reshape(len(part), n_blocks, -1)
        by_32 = part[:, scale_area:].reshape(len(part), cols // 32, -1)
        fields: list[Array] = []
        at = 0
        for i, (kind, count) in enumerate(kinds):
            if i == len(scale_fields):
                at = 0
            area = by_block if i < len(scale_fields) else by_32
            size = np.dtype(kind).itemsize * count * PANEL_ROWS
            raw = np.ascontiguousarray(area[..., at : at + size])
            fields.append(_deinterleave(raw.view(kind).reshape(*raw.shape[:2], count, PANEL_ROWS)))
            at += size
        _join(fields[: len(scale_fields)], fields[len(scale_fields) :], quant, out)

    def unpack(self, data: UInt8, quant: str, shape: Shape) -> Float32:
        return _values(self.to_rows(data, quant, shape), quant, shape)


LAYOUTS: Registry[Layout] = Registry("layout")
LAYOUTS.add("rows", RowsLayout())
LAYOUTS.add("x16", X16Layout())
LAYOUTS.add("mma16", Mma16Layout())
LAYOUTS.add("rows8", Rows8Layout())
