"""From block types to the arrays that checkpoint formats store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from pelton.ir.blocks import row_chunks
from pelton.ir.group_blocks import Float32, UInt8, bits_of, codes
from pelton.ir.tensors import HostTensor
from pelton.models.checkpoint.write.shards import Part

_DENSE = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def dense_part(tensor: HostTensor) -> Part:
    """A dense tensor as it is."""
    return Part(_DENSE[tensor.quant], tensor.data)


def pieces(tensor: HostTensor) -> Iterator[tuple[slice, UInt8, Float32, UInt8 | None]]:
    """Rows, codes, scales and zero points of a block tensor, some rows at a time.

    int8_row's codes are made unsigned by adding 128.
    """
    for part in row_chunks(*tensor.shape):
        rows = HostTensor(tensor.quant, (part.stop - part.start, tensor.shape[1]), tensor.data[part])
        q, d, z = codes(rows)
        yield part, q ^ np.uint8(128) if tensor.quant == "int8_row" else q, d, z


def pack_words(q: UInt8, bits: int) -> npt.NDArray[np.int32]:
    """(rows, n) codes -> (rows, ceil(n bits / 32)) words: each row's bits, lowest first, zeros at its end."""
    rows, n = q.shape
    words = -(-n * bits // 32)
    if bits == 8:
        raw: npt.NDArray[Any] = q
    elif bits == 3:
        single = np.unpackbits(q[..., None], axis=-1, bitorder="little")[..., :bits]
        raw = np.packbits(single.reshape(rows, -1), axis=1, bitorder="little")
    else:
        per = 8 // bits
        padded = np.pad(q, ((0, 0), (0, -n % per)))
        raw = padded[:, 0::per].copy()
        for i in range(1, per):
            raw |= padded[:, i::per] << np.uint8(bits * i)
    full = np.pad(raw, ((0, 0), (0, 4 * words - raw.shape[1])))
    return np.ascontiguousarray(full).view(np.int32)


def scales_and_zeros(tensor: HostTensor) -> tuple[Float32, UInt8 | None]:
    """All scales (rows, groups) of a block tensor, and zero points where its type has them."""
    found = [(d, z) for _, _, d, z in pieces(tensor)]
    d = np.concatenate([d for d, _ in found])
    zeros = [z for _, z in found if z is not None]
    return d, np.concatenate(zeros) if zeros else None


def symmetric(tensor: HostTensor, zeros: UInt8 | None) -> bool:
    """Whether every zero point is the middle code."""
    return zeros is None or bool((zeros == 1 << (bits_of(tensor.quant) - 1)).all())
