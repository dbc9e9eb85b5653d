"""bitsandbytes checkpoints (quant_method bitsandbytes): NF4 and FP4 in blocks, and LLM.int8().

- 4 bits: weight (N K / 2, 1) uint8, the row-major values' codes, the higher nibble first; beside it absmax, a
  scale for each ``blocksize`` values, quant_map, the 16 values, and quant_state.bitsandbytes__nf4, JSON with
  shape and block size. With double quantisation absmax are codes of nested_quant_map, times a nested_absmax
  for each ``nested_blocksize``, plus ``nested_offset`` (Dettmers et al. 2023, QLoRA, section 3).
- 8 bits: weight (N, K) int8 and SCB (N,), the largest magnitude of a row, of which a code is a 127th
  (Dettmers et al. 2022, LLM.int8()).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from pelton.dtypes import BLOCK_TYPES
from pelton.errors import CheckpointError
from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.blocks import row_chunks
from pelton.ir.group_blocks import NF4, from_codes
from pelton.ir.tensors import HostTensor
from pelton.models.checkpoint.quantized.settings import Settings
from pelton.models.checkpoint.quantized.stored import Float32, StoredTensors
from pelton.models.checkpoint.quantized.weight import QuantizedWeight, unpack

_STATE = "quant_state.bitsandbytes__"
_NESTED = ("nested_absmax", "nested_quant_map")
#: Of LLM.int8(): inputs with a larger value are multiplied unquantised.
THRESHOLD = 6.0


def bitsandbytes_weights(settings: Settings, stored: StoredTensors) -> Iterator[QuantizedWeight]:
    """Every quantised weight. Raises ``CheckpointError``."""
    outliers = settings.number("llm_int8_threshold", THRESHOLD)
    for name in stored:
        if not name.endswith(".weight"):
            continue
        state = next((s for kind in ("nf4", "fp4") if (s := f"{name}.{_STATE}{kind}") in stored), None)
        if state is not None:
            yield _four_bits(name, state, stored)
        elif stored.entry(name).type == "int8":
            yield _eight_bits(name, outliers, stored)


def _eight_bits(name: str, outliers: float, stored: StoredTensors) -> QuantizedWeight:
    module = name.removesuffix(".weight")
    rows, cols = stored.need(name, ("int8",)).shape
    scale = f"{module}.SCB"
    stored.need(scale, ("float32",), (rows,))
    marker = f"{module}.weight_format"
    parts = (name, scale, *((marker,) if marker in stored else ()))
    if marker in stored and stored.array(marker).reshape(-1)[0] != 0:
        raise stored.wrong(f"has {name} in a tiled layout ({marker}), and only row-major ones are supported")

    def read() -> tuple[HostTensor, float]:
        d = stored.floats(scale)[:, None] / np.float32(127)
        return from_codes("int8_row", stored.array(name).view(np.uint8), d), 0.0

    return QuantizedWeight(
        name=name,
        parts=parts,
        shape=(rows, cols),
        quant="int8_row",
        read=read,
        activation=ActivationQuant("int8", outliers=outliers),
    )


def _four_bits(name: str, state_name: str, stored: StoredTensors) -> QuantizedWeight:
    state = _state(state_name, stored)
    try:
        rows, cols = (int(size) for size in state["shape"])
        blocksize, kind = int(state["blocksize"]), str(state["quant_type"])
        nested = "nested_blocksize" in state
        nested_blocksize, offset = int(state.get("nested_blocksize", 1)), float(state.get("nested_offset", 0))
    except (KeyError, TypeError, ValueError) as error:
        raise stored.wrong(f"has a {state_name} without shape, blocksize and quant_type") from error
    count = rows * cols
    if min(rows, cols, blocksize, nested_blocksize) < 1 or stored.entry(name).nbytes * 2 != count + count % 2:
        raise stored.wrong(
            f"has {name} of {stored.entry(name).nbytes} bytes, and its quant_state says {rows} x {cols} in "
            f"blocks of {blocksize}"
        )
    blocks = -(-count // blocksize)
    absmax, book = f"{name}.absmax", f"{name}.quant_map"
    stored.need(absmax, ("uint8",) if nested else ("float32",), (blocks,))
    stored.need(book, ("float32",), (16,))
    parts = [name, state_name, absmax, book]
    if nested:
        parts += [f"{name}.{part}" for part in _NESTED]
        stored.need(f"{name}.nested_absmax", ("float32",), (-(-blocks // nested_blocksize),))
        stored.need(f"{name}.nested_quant_map", ("float32",), (256,))
    values = stored.floats(book)
    whole = cols % 64 == 0 and blocksize % 64 == 0
    quant = "nf4_g64" if whole and np.array_equal(values, NF4) else f"bitsandbytes_{kind}_g{blocksize}"

    def scales() -> Float32:
        if not nested:
            return stored.floats(absmax)
        outer = np.repeat(stored.floats(f"{name}.nested_absmax"), nested_blocksize)[:blocks]
        return stored.floats(f"{name}.nested_quant_map")[stored.array(absmax)] * outer + np.float32(offset)

    def read() -> tuple[HostTensor, float]:
        raw, d = stored.array(name).reshape(-1), scales()
        dense = quant not in BLOCK_TYPES
        width = cols if dense else BLOCK_TYPES[quant].row_bytes(cols)
        out = np.empty((rows, width), np.float32 if dense else np.uint8)
        for part in row_chunks(rows, cols):
            start, stop = part.start * cols, part.stop * cols
            swapped = unpack(raw[None, start // 2 : -(-stop // 2)], 4)[0].reshape(-1, 2)[:, ::-1].reshape(-1)
            q = swapped[start % 2 :][: stop - start].reshape(-1, cols)
            if dense:
                out[part] = values[q] * d[np.arange(start, stop) // blocksize].reshape(-1, cols)
            else:
                groups = np.arange(start // 64, stop // 64) * 64 // blocksize
                out[part] = from_codes(quant, q, d[groups].reshape(-1, cols // 64)).data
        return HostTensor("float32" if dense else quant, (rows, cols), out), 0.0

    return QuantizedWeight(name=name, parts=tuple(parts), shape=(rows, cols), quant=quant, read=read)


def _state(name: str, stored: StoredTensors) -> dict[str, Any]:
    try:
        state = json.loads(bytes(stored.array(name).astype(np.uint8)))
    except ValueError as error:
        raise stored.wrong(f"has a {name} that is not JSON") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{stored.where} has a {name} that is not a JSON object")
    return state
