"""Evaluate weight recipes on host tensors: numpy only, one weight at a time.

Row operations work on any value type. A block-quantised tensor is an array of block rows, and since
no block crosses a row, stacking, slicing and permuting those rows is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pelton.dtypes import is_dense
from pelton.errors import CheckpointError
from pelton.ir.blocks import dequantize
from pelton.ir.recipe import (
    AddScalar,
    Columns,
    Concat,
    Flatten,
    Full,
    PadRows,
    PermuteRows,
    Product,
    PutColumns,
    Recipe,
    Rows,
    Scale,
    ScaleColumns,
    ScaleRows,
    Source,
    Sum,
    TakeColumns,
    TakeRows,
    Transpose,
    is_power_of_two,
)
from pelton.ir.tensors import HostTensor, bf16_to_f32, f32_to_bf16


class TensorLike(Protocol):
    """What inference needs of a checkpoint tensor; ``TensorInfo`` and ``HostTensor`` are such."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def quant(self) -> str: ...


def evaluate(recipe: Recipe, read: Callable[[str], HostTensor]) -> HostTensor:
    """The tensor that ``recipe`` describes; ``read`` gives checkpoint tensors by name.

    float16 and bfloat16 values keep their type and bits except under arithmetic, which gives float32
    (but for ``Scale`` by a power of two). Raises ``CheckpointError`` when a recipe needs dense values and
    the checkpoint holds blocks. A ``Source`` alone returns what ``read`` returned: a view of the mapped
    file, not a copy.
    """
    match recipe:
        case Source(name):
            return read(name)
        case Concat(parts):
            return _concat([evaluate(part, read) for part in parts])
        case Rows(base, start, stop):
            tensor = evaluate(base, read)
            assert 0 <= start <= stop <= tensor.shape[0], f"rows {start}:{stop} of {tensor.shape}"
            return HostTensor(tensor.quant, (stop - start, *tensor.shape[1:]), tensor.data[start:stop])
        case PermuteRows(base, heads, inner):
            tensor = evaluate(base, read)
            return HostTensor(tensor.quant, tensor.shape, permute_rows(tensor.data, heads, inner))
        case TakeRows(base, order):
            tensor = evaluate(base, read)
            return HostTensor(tensor.quant, tensor.shape, tensor.data[evaluate(order, read).data])
        case TakeColumns(base, order):
            tensor, columns = _loose(evaluate(base, read)), evaluate(order, read).data
            return HostTensor(tensor.quant, tensor.shape, tensor.data[:, columns])
        case PutColumns(base, order):
            tensor, columns = _loose(evaluate(base, read)), evaluate(order, read).data
            put = np.empty_like(tensor.data)
            put[:, columns] = tensor.data
            return HostTensor(tensor.quant, tensor.shape, put)
        case Transpose(base):
            tensor = evaluate(base, read)
            _need_dense(tensor.quant, recipe, "transposed")
            return HostTensor(tensor.quant, tensor.shape[::-1], np.ascontiguousarray(tensor.data.T))
        case AddScalar(base, value):
            tensor = evaluate(base, read)
            _need_dense(tensor.quant, recipe, "added to")
            data = _float32(tensor) + np.float32(value)
            return HostTensor("float32", tensor.shape, data)
        case PadRows(base, rows):
            return _pad_rows(evaluate(base, read), rows)
        case Columns(base, start, stop):
            tensor = evaluate(base, read)
            _need_dense(tensor.quant, recipe, "split by columns")
            return HostTensor(tensor.quant, (tensor.shape[0], stop - start), tensor.data[:, start:stop])
        case Scale(base, factor):
            tensor = evaluate(base, read)
            _need_dense(tensor.quant, recipe, "scaled")
            scaled = HostTensor("float32", tensor.shape, _float32(tensor) * np.float32(factor))
            return _narrow(scaled, tensor.quant) if is_power_of_two(factor) else scaled
        case ScaleColumns(base, factors):
            tensor, by_column = evaluate(base, read), evaluate(factors, read)
            _need_dense(tensor.quant, base, "scaled")
            _need_dense(by_column.quant, factors, "scaled with")
            return HostTensor("float32", tensor.shape, _float32(tensor) * _float32(by_column))
        case ScaleRows(base, by_row):
            tensor = evaluate(base, read)
            _need_dense(tensor.quant, recipe, "scaled")
            column = np.array(by_row, np.float32).reshape(-1, *[1] * (len(tensor.shape) - 1))
            scaled = HostTensor("float32", tensor.shape, _float32(tensor) * column)
            return _narrow(scaled, tensor.quant) if all(map(is_power_of_two, by_row)) else scaled
        case Product(weight, vector):
            matrix, by_column = evaluate(weight, read), evaluate(vector, read)
            _need_dense(matrix.quant, weight, "multiplied")
            product = _float32(matrix) @ _float32(by_column)
            return HostTensor("float32", product.shape, product)
        case Sum(parts):
            tensors = [evaluate(part, read) for part in parts]
            for tensor in tensors:
                _need_dense(tensor.quant, recipe, "added up")
            total = np.zeros(tensors[0].shape, np.float32)
            for tensor in tensors:
                total += _float32(tensor)
            return HostTensor("float32", total.shape, total)
        case Flatten(base):
            tensor = evaluate(base, read)
            _need_dense(tensor.quant, recipe, "flattened")
            return HostTensor(tensor.quant, (tensor.data.size,), tensor.data.reshape(-1))
        case Full(size, value):
            return HostTensor("float32", (size,), np.full(size, value, np.float32))
    raise AssertionError(f"unknown recipe {type(recipe).__name__}")


def permute_rows(data: npt.NDArray[np.generic], heads: int, inner: int) -> npt.NDArray[np.generic]:
    """Rows seen as (heads, rows/heads/inner, inner), the last two axes swapped (``PermuteRows``)."""
    rows = data.shape[0]
    assert rows % (heads * inner) == 0, f"{rows} rows do not divide into {heads} heads of {inner}"
    grouped = data.reshape(heads, rows // heads // inner, inner, *data.shape[1:])
    return np.ascontiguousarray(grouped.swapaxes(1, 2)).reshape(data.shape)


def infer_shape(recipe: Recipe, infos: Mapping[str, TensorLike]) -> tuple[int, ...]:
    """Shape of what ``evaluate`` would give, without reading."""
    match recipe:
        case Source(name):
            return infos[name].shape
        case Concat(parts):
            shapes = [infer_shape(part, infos) for part in parts]
            assert len({shape[1:] for shape in shapes}) == 1, f"concat of {shapes}"
            return (sum(shape[0] for shape in shapes), *shapes[0][1:])
        case Rows(base, start, stop):
            return (stop - start, *infer_shape(base, infos)[1:])
        case PermuteRows(base) | AddScalar(base) | Scale(base) | ScaleColumns(base) | ScaleRows(base):
            return infer_shape(base, infos)
        case TakeColumns(base) | PutColumns(base) | TakeRows(base):
            return infer_shape(base, infos)
        case PadRows(base, rows):
            return (rows, *infer_shape(base, infos)[1:])
        case Columns(base, start, stop):
            return (infer_shape(base, infos)[0], stop - start)
        case Product(weight):
            return infer_shape(weight, infos)[:1]
        case Sum(parts):
            return infer_shape(parts[0], infos)
        case Flatten(base):
            return (math.prod(infer_shape(base, infos)),)
        case Full(size):
            return (size,)
        case Transpose(base):
            return infer_shape(base, infos)[::-1]
    raise AssertionError(f"unknown recipe {type(recipe).__name__}")


def infer_quant(recipe: Recipe, infos: Mapping[str, TensorLike]) -> str:
    """Value type of what ``evaluate`` would give, without reading; raises as ``evaluate`` would."""
    match recipe:
        case Source(name):
            return infos[name].quant
        case Concat(parts):
            return _common({infer_quant(part, infos) for part in parts})
        case Rows(base) | PadRows(base) | PermuteRows(base) | TakeRows(base):
            return infer_quant(base, infos)
        case TakeColumns(base) | PutColumns(base):
            quant = infer_quant(base, infos)
            return quant if is_dense(quant) else "float32"
        case Columns(base):
            quant = infer_quant(base, infos)
            _need_dense(quant, recipe, "split by columns")
            return quant
        case Scale(base, factor):
            quant = infer_quant(base, infos)
            _need_dense(quant, recipe, "scaled")
            return quant if is_power_of_two(factor) else "float32"
        case ScaleRows(base, by_row):
            quant = infer_quant(base, infos)
            _need_dense(quant, recipe, "scaled")
            return quant if all(map(is_power_of_two, by_row)) else "float32"
        case ScaleColumns(base):
            _need_dense(infer_quant(base, infos), base, "scaled")
            return "float32"
        case Product(weight):
            _need_dense(infer_quant(weight, infos), weight, "multiplied")
            return "float32"
        case Sum(parts):
            for part in parts:
                _need_dense(infer_quant(part, infos), recipe, "added up")
            return "float32"
        case Flatten(base):
            quant = infer_quant(base, infos)
            _need_dense(quant, recipe, "flattened")
            return quant
        case Full():
            return "float32"
        case Transpose(base):
            quant = infer_quant(base, infos)
            _need_dense(quant, recipe, "transposed")
            return quant
        case AddScalar(base):
            _need_dense(infer_quant(base, infos), recipe, "added to")
            return "float32"
    raise AssertionError(f"unknown recipe {type(recipe).__name__}")


def _loose(tensor: HostTensor) -> HostTensor:
    """Values that can be moved one by one."""
    return tensor if tensor.dense else HostTensor("float32", tensor.shape, dequantize(tensor))


def _concat(parts: list[HostTensor]) -> HostTensor:
    quant = _common({part.quant for part in parts})
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    if any(part.quant != quant for part in parts):
        return HostTensor(quant, shape, np.concatenate([_float32(part) for part in parts]))
    return HostTensor(quant, shape, np.concatenate([part.data for part in parts]))


def _common(quants: set[str]) -> str:
    """The type of a stack of such parts."""
    if len(quants) > 1:
        assert all(is_dense(quant) for quant in quants), f"a stack of different value types {sorted(quants)}"
        return "float32"
    return next(iter(quants))


def _pad_rows(tensor: HostTensor, rows: int) -> HostTensor:
    """A row of a block type that is all zero bytes is a row of zeros: its scales are."""
    missing = rows - tensor.shape[0]
    assert missing >= 0, f"{rows} rows of {tensor.shape}"
    zeros = np.zeros((missing, *tensor.data.shape[1:]), tensor.data.dtype)
    return HostTensor(tensor.quant, (rows, *tensor.shape[1:]), np.concatenate([tensor.data, zeros]))


def _narrow(tensor: HostTensor, quant: str) -> HostTensor:
    values = np.asarray(tensor.data, np.float32)
    if quant == "bfloat16":
        return HostTensor(quant, tensor.shape, f32_to_bf16(values))
    return HostTensor(quant, tensor.shape, values.astype(quant))


def _need_dense(quant: str, recipe: Recipe, verb: str) -> None:
    if not is_dense(quant):
        names = ", ".join(recipe.sources())
        raise CheckpointError(
            f"tensor {names} is stored as {quant} blocks, which cannot be {verb} without loss; "
            f"use a checkpoint that keeps it as float32, float16 or bfloat16"
        )


def _float32(tensor: HostTensor) -> npt.NDArray[np.float32]:
    if tensor.quant == "bfloat16":
        return bf16_to_f32(tensor.data)
    return tensor.data.astype(np.float32)
