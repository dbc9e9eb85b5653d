"""What a plan must satisfy before it may touch memory: the executable form of ``plan.py``.

The native runner trusts offsets and indices, so a damaged or hand-made plan is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping

from pelton.dtypes import ITEMSIZE
from pelton.engine.config import EngineConfig
from pelton.engine.plan import Buffer, Operand, Plan
from pelton.engine.shards import ALIGNMENT, TensorMeta


def dim_values(dims: Mapping[str, int]) -> dict[str, int]:
    """``dims`` with the derived dimension ``B+1``."""
    return {**dims, "B+1": dims["B"] + 1}


def check_plan(plan: Plan, config: EngineConfig, weights: Mapping[str, TensorMeta]) -> None:
    """Raise ``ValueError`` saying what is wrong with ``plan``."""
    for name in ("T", "B", "N"):
        if plan.dims.get(name, 0) < 1:
            raise ValueError(f"dimension {name} has no positive size")
    if plan.arena_bytes < 0 or plan.workspace_bytes < 0:
        raise ValueError("a memory size is negative")
    dims = dim_values(plan.dims)
    for buffer in plan.buffers:
        _check_buffer(buffer, plan, config, weights, dims)
    for operand in plan.operands:
        if not 0 <= operand.buffer < len(plan.buffers):
            raise ValueError(f"operand {operand.name} has no buffer {operand.buffer}")
        _check_operand(operand, plan.buffers[operand.buffer], dims)
    count = len(plan.operands)
    for instruction in plan.instructions:
        if any(not -1 <= i < count for i in instruction.inputs) or any(
            not 0 <= i < count for i in instruction.outputs
        ):
            raise ValueError(f"instruction {instruction.name} uses an operand that does not exist")
    if not 0 <= plan.logits < count:
        raise ValueError("the logits are no operand")


def _check_buffer(
    buffer: Buffer,
    plan: Plan,
    config: EngineConfig,
    weights: Mapping[str, TensorMeta],
    dims: Mapping[str, int],
) -> None:
    name = buffer.name
    if buffer.dtype not in ITEMSIZE:
        raise ValueError(f"buffer {name} has unknown type {buffer.dtype}")
    if buffer.kind == "arena":
        if buffer.offset % ALIGNMENT or not 0 <= buffer.offset <= plan.arena_bytes - buffer.nbytes:
            raise ValueError(f"buffer {name} lies outside the arena")
        if buffer.nbytes < _extent(buffer.shape, dims) * ITEMSIZE[buffer.dtype]:
            raise ValueError(f"buffer {name} is smaller than its shape")
    elif buffer.kind in ("weight", "constant"):
        if name not in weights:
            raise ValueError(f"weight {name} is in no shard")
        meta = weights[name]
        if (meta.quant, meta.layout, meta.shape) != (buffer.quant, buffer.layout, buffer.shape):
            raise ValueError(f"weight {name} is stored otherwise than the plan says")
    elif buffer.kind in ("k_cache", "v_cache"):
        groups = config.model.kv_groups
        if not 0 <= buffer.group < len(groups) or buffer.layer not in groups[buffer.group].layers:
            raise ValueError(f"buffer {name} belongs to no KV group")


def _check_operand(operand: Operand, buffer: Buffer, dims: Mapping[str, int]) -> None:
    if len(operand.shape) != len(operand.strides):
        raise ValueError(f"operand {operand.name} has {len(operand.strides)} strides")
    for i, dim in enumerate(operand.shape):
        if isinstance(dim, str) and dim not in dims and not (buffer.kind.endswith("_cache") and i == 0):
            raise ValueError(f"operand {operand.name} has unknown dimension {dim}")
    if buffer.kind != "arena":
        return
    shape = [dims[d] if isinstance(d, str) else d for d in operand.shape]
    last = operand.offset + sum(
        (n - 1) * stride for n, stride in zip(shape, operand.strides, strict=True) if n > 0
    )
    fits = (last + 1) * ITEMSIZE[buffer.dtype] <= buffer.nbytes
    if operand.offset < 0 or any(s < 0 for s in operand.strides) or not fits:
        raise ValueError(f"operand {operand.name} reaches beyond its buffer")


def _extent(shape: tuple[int | str, ...], dims: Mapping[str, int]) -> int:
    total = 1
    for dim in shape:
        total *= dims[dim] if isinstance(dim, str) else dim
    return total
