"""Generated operands of a call, to check and time tactics on.

Random values, a plausible step, and real encodings of block types. A large weight repeats a few
encoded rows, so that making it costs no more than copying.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pelton.builder.signature import OperandSignature, Signature, StepSignature
from pelton.dtypes import is_dense
from pelton.ir.block_encoder import quantize
from pelton.ir.op import Op, Sample
from pelton.ir.ops import quantize_q8
from pelton.ir.tensors import HostTensor, f32_to_bf16
from pelton.kernels.layouts import LAYOUTS

_ENCODED_ROWS = 64

UInt8 = npt.NDArray[np.uint8]


def torch_operands(signature: Signature, seed: int = 0) -> list[torch.Tensor | None]:
    """The tensors of a call in the schema's order; weights dense, with the values before encoding."""
    g = torch.Generator().manual_seed(seed)
    return [None if o is None else _operand(o, signature, g) for o in signature.inputs]


def sample_of(op: Op, signature: Signature, seed: int = 0) -> Sample:
    """The call as a conformance sample."""
    tensors = iter(torch_operands(signature, seed))
    args: list[Any] = []
    for parameter in op.torch_op._schema.arguments:
        if "Tensor" in str(parameter.type):
            args.append(next(tensors))
        else:
            args.append(signature.attrs.get(parameter.name, parameter.default_value))
    quant = {
        i: o.dtype
        for i, o in enumerate(signature.inputs)
        if o is not None and o.kind == "weight" and len(o.shape) > 1
    }
    return Sample(args=tuple(args), name=signature.key, quant=quant)


def _operand(o: OperandSignature, signature: Signature, g: torch.Generator) -> torch.Tensor:
    if o.kind == "weight":
        return torch.randn(o.shape, generator=g) * o.shape[-1] ** -0.5
    if o.kind not in ("value", "cache"):
        assert signature.step is not None
        return torch.from_numpy(step_input(o, signature, signature.step))
    if not o.strides:
        return random_values(o.dtype, o.shape, g)
    extent = 1 + sum((n - 1) * s for n, s in zip(o.shape, o.strides, strict=True))
    return random_values(o.dtype, (extent,), g).as_strided(o.shape, o.strides)


def random_values(dtype: str, shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    """An intermediate tensor or cache: normal numbers, or rows of them that ``quantize_q8`` made."""
    if dtype == "uint8":
        columns = shape[-1] // quantize_q8.BLOCK_BYTES * quantize_q8.BLOCK
        return quantize_q8.reference(torch.randn((*shape[:-1], columns), generator=g))
    return torch.randn(shape, generator=g).to(getattr(torch, dtype))


def step_input(o: OperandSignature, signature: Signature, step: StepSignature) -> npt.NDArray[np.int32]:
    """An int32 input of the step, by its name. Blocks are dealt out in a shuffled order."""
    rng = np.random.default_rng(0)
    queries, keys = np.array(step.queries), np.array(step.keys)
    starts = np.concatenate([[0], np.cumsum(queries)])
    positions = np.concatenate([np.arange(k - q, k) for q, k in zip(queries, keys, strict=True)])
    if o.kind == "input_ids":
        values = rng.integers(0, max(1, signature.weight_rows), step.tokens)
    elif o.kind == "positions":
        values = positions
    elif o.kind == "seq_lens":
        values = keys
    elif o.kind == "cu_seqlens":
        values = starts
    elif o.kind == "logits_indices":
        values = np.sort(rng.permutation(step.tokens)[: o.shape[0]])
    else:
        assert o.kind in ("block_table", "slot_mapping"), f"no values are known for step input {o.kind}"
        block_size = next((c.shape[2] for c in signature.inputs if c is not None and c.kind == "cache"), 16)
        need = -(-keys // block_size)
        pool = rng.permutation(int(need.sum()))
        ends = np.cumsum(need)
        rows = [pool[end - n : end] for n, end in zip(need, ends, strict=True)]
        if o.kind == "block_table":
            table = np.zeros(o.shape, np.int32)
            for row, blocks in zip(table, rows, strict=True):
                row[: min(len(blocks), len(row))] = blocks[: len(row)]
            return table
        owner = np.repeat(np.arange(len(queries)), queries)
        blocks_of = [rows[b][p // block_size] for b, p in zip(owner, positions, strict=True)]
        values = np.array(blocks_of) * block_size + positions % block_size
    return np.ascontiguousarray(values, np.int32)


def packed(o: OperandSignature, layout: str) -> UInt8:
    """A weight operand in ``layout``."""
    rows, cols = math.prod(o.shape[:-1]), o.shape[-1]
    encoded = min(rows, _ENCODED_ROWS)
    values = np.random.default_rng(0).standard_normal((encoded, cols), np.float32) * np.float32(cols**-0.5)
    if not is_dense(o.dtype):
        few = quantize(values, o.dtype).data
    elif o.dtype == "bfloat16":
        few = f32_to_bf16(values)
    else:
        few = values.astype(o.dtype)
    times = -(-rows // encoded)
    data = np.tile(few, (times, 1))[:rows]
    if is_dense(o.dtype):
        data = data.reshape(o.shape)
    return LAYOUTS[layout].pack(HostTensor(o.dtype, o.shape, data))
