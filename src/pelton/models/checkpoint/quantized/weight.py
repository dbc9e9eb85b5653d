"""One quantised weight: which stored tensors it is made of, and how they become one of our block types."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pelton.dtypes import BLOCK_TYPES, GROUP_SIZES
from pelton.errors import CheckpointError
from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.blocks import row_chunks
from pelton.ir.group_blocks import from_codes, group_of
from pelton.ir.tensors import HostTensor
from pelton.models.checkpoint.quantized.stored import Array, Float32, StoredTensors, UInt8


@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """A weight of the Hugging Face model that is stored in several tensors."""

    name: str
    parts: tuple[str, ...]
    """The stored tensors that it is made of."""
    shape: tuple[int, int]
    quant: str
    """A block type, or another name (``int4_g16``) where ``read`` dequantises to float32."""
    read: Callable[[], tuple[HostTensor, float]]
    """The weight, and the relative error that rounding its scales to the block type's made (0: none)."""
    activation: ActivationQuant | None = None
    """How the input of its product is quantised."""
    order: Callable[[], Array] | None = None
    """The column of the Hugging Face weight that each column of what ``read`` gives is; None: its own."""

    @property
    def order_name(self) -> str:
        """What the order is called, as a tensor of the checkpoint."""
        return f"{self.name.removesuffix('.weight')}.input_order"

    @property
    def note(self) -> str:
        """What the build report should say, when it is not read as it is stored."""
        return "" if self.quant in BLOCK_TYPES else f"{self.quant} has no Pelton block type: read as float32"


@dataclass(frozen=True)
class Integers:
    """Some rows of an integer weight: value (r, c) is ``d[r, g] (q[r, c] - z[r, g])``, g the group of c."""

    q: UInt8
    """(rows, cols) unsigned codes."""
    d: Float32
    """(rows, groups)."""
    z: Array | None = None
    """(rows, groups) zero points; None: the middle code."""


@dataclass(frozen=True, kw_only=True)
class IntegerWeight:
    """``read`` of a weight of unsigned ``bits``-bit codes with a scale for each ``group`` columns."""

    shape: tuple[int, int]
    bits: int
    group: int
    """Columns that share a scale; all of them: the row has one."""
    start: Callable[[], Callable[[slice], Integers]]
    """What reads some rows; it may hold what all of them need."""
    signed: bool = False
    """No zero points, so that 8-bit codes with one scale a row are int8."""
    index: Callable[[], Array] | None = field(default=None)
    """The group of each column, where that is not ``column // group`` (act-order)."""
    whole: bool = True
    """Every group has ``group`` columns, so that they can be put together."""

    @property
    def order(self) -> Callable[[], Array] | None:
        """Columns as ``read`` gives them: those of a group together, in their order."""
        if self.index is None or not self.whole or self._block_type is None:
            return None
        index = self.index
        return lambda: np.argsort(index(), kind="stable").astype(np.int32)

    @property
    def quant(self) -> str:
        """The block type that holds it, else a name of the format's own."""
        if self.index is not None and not self.whole:
            return f"int{self.bits}_g{self.group}_act_order"
        return self._block_type or f"int{self.bits}_g{self.group}"

    @property
    def _block_type(self) -> str | None:
        cols = self.shape[1]
        if self.signed and self.bits == 8 and self.group == cols:
            return "int8_row"
        size = next((s for s in reversed(GROUP_SIZES) if self.group % s == 0 and cols % s == 0), None)
        return None if size is None else f"int{self.bits}_g{size}"

    def read(self) -> tuple[HostTensor, float]:
        """The weight and the relative error of its rounded scales. Raises ``CheckpointError``."""
        rows, cols = self.shape
        quant, groups = self.quant, self._groups()
        block = BLOCK_TYPES.get(quant)
        order = None if self.order is None else self.order()
        kind, width = (np.float32, cols) if block is None else (np.uint8, block.row_bytes(cols))
        out = np.empty((rows, width), kind)
        error = total = 0.0
        read_rows = self.start()
        for part in row_chunks(rows, cols):
            piece = read_rows(part)
            if block is None:
                out[part] = _dequantized(piece, groups, self.bits)
                continue
            if quant == "int8_row":
                out[part] = from_codes(quant, piece.q ^ np.uint8(128), piece.d).data
                continue
            d = self._rounded(piece.d)
            finite = np.where(np.isfinite(piece.d), piece.d, 0)  # broken ones are counted elsewhere
            error += float(np.square(np.where(finite == piece.d, d, 0) - finite, dtype=np.float64).sum())
            total += float(np.square(finite, dtype=np.float64).sum())
            repeat = math.ceil(self.group / group_of(quant))
            z = None if piece.z is None else np.repeat(piece.z.astype(np.uint8), repeat, axis=1)
            q = piece.q if order is None else piece.q[:, order]
            out[part] = from_codes(quant, q, np.repeat(d, repeat, axis=1), z).data
        return HostTensor("float32" if block is None else quant, self.shape, out), _root(error, total)

    def _groups(self) -> Array:
        return np.arange(self.shape[1]) // self.group if self.index is None else self.index()

    def _rounded(self, d: Float32) -> Float32:
        if self.bits == 8:
            return d
        with np.errstate(over="ignore"):
            rounded = d.astype(np.float16).astype(np.float32)
        if np.isinf(rounded).any() and not np.isinf(d).any():
            raise CheckpointError(
                f"a {self.bits}-bit weight has a scale of {np.abs(d).max():.3g}, beyond float16, in which "
                "Pelton keeps scales of such codes"
            )
        return rounded


def act_order(
    index: Array, group: int, name: str, stored: StoredTensors
) -> tuple[Callable[[], Array] | None, bool]:
    """What reads the group of each column, None where they are neighbours, and whether groups are whole.

    ``name``: of the stored ``index``. It is small, and how the weight can be used depends on it: looked at
    at once. Raises ``CheckpointError`` for a group that is not there.
    """
    groups = len(index) // group
    if index.min() < 0 or index.max() >= groups:
        worst = index.min() if index.min() < 0 else index.max()
        raise stored.wrong(f"has {name} with group {worst}, and {groups} groups")
    if np.array_equal(index, np.arange(len(index)) // group):
        return None, True
    whole = bool((np.bincount(index, minlength=groups) == group).all())
    return lambda: stored.array(name), whole


def _dequantized(piece: Integers, groups: Array, bits: int) -> Float32:
    """The values, for codes that no block type holds."""
    z: Array | np.float32 = np.float32(1 << (bits - 1))
    if piece.z is not None:
        z = piece.z.astype(np.float32)[:, groups]
    values: Float32 = piece.d[:, groups] * (piece.q.astype(np.float32) - z)
    return values


def _root(error: float, total: float) -> float:
    return (error / total) ** 0.5 if total else 0.0


def unpack(words: Array, bits: int) -> UInt8:
    """(rows, n) integers of any width -> (rows, n * width / bits) codes: each row's bits, lowest first."""
    raw = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return raw
    if bits == 4:
        out = np.empty((len(raw), raw.shape[1] * 2), np.uint8)
        out[:, 0::2], out[:, 1::2] = raw & 15, raw >> 4
        return out
    if bits == 2:
        out = np.empty((len(raw), raw.shape[1] * 4), np.uint8)
        for i in range(4):
            out[:, i::4] = raw >> 2 * i & 3
        return out
    single = np.unpackbits(raw, axis=1, bitorder="little")
    codes = single[:, : single.shape[1] // bits * bits].reshape(len(raw), -1, bits)
    weights = (1 << np.arange(bits)).astype(np.uint8)
    unpacked: UInt8 = (codes * weights).sum(axis=-1, dtype=np.uint8)
    return unpacked
