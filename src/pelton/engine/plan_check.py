"""What a plan must satisfy before it may touch memory: the executable form of ``plan.py``.

The native runner trusts offsets, shapes and indices, so a damaged or hand-made plan is refused here:
buffers and operands in this file, instructions in ``instruction_check``.
"""

from __future__ import annotations

from collections.abc import Mapping

from pelton.dtypes import BLOCK_TYPES, ITEMSIZE, is_dense
from pelton.engine.config import EngineConfig
from pelton.engine.instruction_check import check_instruction, check_limits
from pelton.engine.kv_cache import sequence_blocks
from pelton.engine.plan import Buffer, Dim, Operand, Plan
from pelton.engine.shards import ALIGNMENT, TensorMeta
from pelton.kernels.layouts import LAYOUTS

MAX_DIMS = 4
#: No tensor is larger; keeps products of sizes and strides within 64 bits.
MAX_BYTES = 1 << 46


def dim_values(dims: Mapping[str, int]) -> dict[str, int]:
    """``dims`` with the derived dimension ``B+1``."""
    return {**dims, "B+1": dims["B"] + 1}


def check_plan(plan: Plan, config: EngineConfig, weights: Mapping[str, TensorMeta]) -> None:
    """Raise ``ValueError`` saying what is wrong with ``plan``.

    What is checked of inputs, caches and instructions is what the CPU's kernels trust; a GPU's launches
    have their own checks.
    """
    build = config.build
    for name in ("T", "B", "N"):
        if plan.dims.get(name, 0) < 1:
            raise ValueError(f"dimension {name} has no positive size")
    if (plan.dims["T"], plan.dims["B"]) != (build.max_num_tokens, build.max_batch_size):
        raise ValueError("its sizes are not those of config.json")
    if plan.dims["N"] > plan.dims["T"] or set(plan.dims) != {"T", "B", "N"}:
        raise ValueError("its dimensions are not tokens, sequences and logits rows")
    if plan.arena_bytes < 0 or plan.workspace_bytes < 0:
        raise ValueError("a memory size is negative")
    if (plan.arena_bytes, plan.workspace_bytes) != (config.memory.arena, config.memory.workspace):
        raise ValueError("its memory is not that of config.json")
    dims = dim_values(plan.dims)
    on_cpu = build.target == "cpu"
    for buffer in plan.buffers:
        _check_buffer(buffer, plan, config, weights, dims)
    for operand in plan.operands:
        if not 0 <= operand.buffer < len(plan.buffers):
            raise ValueError(f"operand {operand.name} has no buffer {operand.buffer}")
        _check_operand(operand, plan.buffers[operand.buffer], dims, on_cpu)
    count = len(plan.operands)
    names = [instruction.name for instruction in plan.instructions]
    if len(set(names)) < len(names):
        raise ValueError("two instructions have one name")
    for instruction in plan.instructions:
        if any(not -1 <= i < count for i in instruction.inputs) or any(
            not 0 <= i < count for i in instruction.outputs
        ):
            raise ValueError(f"instruction {instruction.name} uses an operand that does not exist")
        if on_cpu:
            check_instruction(instruction, plan, config)
        elif not instruction.tactics:
            raise ValueError(f"instruction {instruction.name} has no tactic")
        else:
            check_limits(instruction, plan)
    if not 0 <= plan.logits < count:
        raise ValueError("the logits are no operand")
    logits = plan.operands[plan.logits]
    where = plan.buffers[logits.buffer]
    if logits.shape != ("N", config.model.vocab_size) or (where.kind, where.dtype) != ("arena", "float32"):
        raise ValueError("the logits are not float32 of (N, vocabulary)")


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
    if len(buffer.shape) > MAX_DIMS or any(isinstance(d, int) and d < 0 for d in buffer.shape):
        raise ValueError(f"buffer {name} has a shape of {list(buffer.shape)}")
    if buffer.kind == "arena":
        if buffer.offset % ALIGNMENT or not 0 <= buffer.offset <= plan.arena_bytes - buffer.nbytes:
            raise ValueError(f"buffer {name} lies outside the arena")
        if buffer.nbytes < _extent(buffer.shape, dims, name) * ITEMSIZE[buffer.dtype]:
            raise ValueError(f"buffer {name} is smaller than its shape")
    elif buffer.kind == "input":
        wanted = "int32", _input_shape(name, config)
        if (buffer.dtype, buffer.shape) != wanted:
            raise ValueError(f"buffer {name} is no input of a step")
    elif buffer.kind in ("weight", "constant"):
        _check_weight(buffer, weights)
    else:
        _check_cache(buffer, config)


def _input_shape(name: str, config: EngineConfig) -> tuple[Dim, ...] | None:
    """Shape of the step input called ``name``; None: there is none."""
    plain: dict[str, tuple[Dim, ...]] = {
        "input_ids": ("T",),
        "positions": ("T",),
        "logits_indices": ("N",),
        "cu_seqlens": ("B+1",),
        "seq_lens": ("B",),
    }
    kind, _, group = name.partition(".")
    if not group:
        return plain.get(name)
    if not group.isdecimal() or int(group) >= len(config.model.kv_groups) or group != str(int(group)):
        return None
    grouped: dict[str, tuple[Dim, ...]] = {
        "slot_mapping": ("T",),
        "block_table": ("B", sequence_blocks(config)),
    }
    return grouped.get(kind)


def _check_weight(buffer: Buffer, weights: Mapping[str, TensorMeta]) -> None:
    name = buffer.name
    if name not in weights:
        raise ValueError(f"weight {name} is in no shard")
    meta = weights[name]
    if (meta.quant, meta.layout, meta.shape) != (buffer.quant, buffer.layout, buffer.shape):
        raise ValueError(f"weight {name} is stored otherwise than the plan says")
    dense = is_dense(buffer.quant)
    if buffer.layout not in LAYOUTS or not (dense or buffer.quant in BLOCK_TYPES):
        raise ValueError(f"weight {name} has the unknown layout {buffer.layout} or type {buffer.quant}")
    if buffer.dtype != (buffer.quant if dense and buffer.layout == "rows" else "uint8"):
        raise ValueError(f"weight {name} is no {buffer.dtype}")
    try:
        nbytes = LAYOUTS[buffer.layout].nbytes(buffer.quant, meta.shape)
    except (ArithmeticError, AssertionError, LookupError, ValueError):
        nbytes = -1
    if not 0 <= nbytes == meta.nbytes == buffer.nbytes:
        raise ValueError(f"weight {name} has {meta.nbytes} bytes, which is not what its shape takes")


def _check_cache(buffer: Buffer, config: EngineConfig) -> None:
    groups, build = config.model.kv_groups, config.build
    if not 0 <= buffer.group < len(groups) or buffer.layer not in groups[buffer.group].layers:
        raise ValueError(f"buffer {buffer.name} belongs to no KV group")
    group = groups[buffer.group]
    shape = (f"P{buffer.group}", group.num_kv_heads, build.block_size, group.head_dim)
    if buffer.shape != shape or buffer.dtype != build.kv_dtype:
        raise ValueError(f"buffer {buffer.name} is no cache of KV group {buffer.group}")


def _check_operand(operand: Operand, buffer: Buffer, dims: Mapping[str, int], on_cpu: bool) -> None:
    name = operand.name
    if len(operand.shape) != len(operand.strides):
        raise ValueError(f"operand {name} has {len(operand.strides)} strides")
    if len(operand.shape) > MAX_DIMS:
        raise ValueError(f"operand {name} has {len(operand.shape)} dimensions")
    for i, dim in enumerate(operand.shape):
        blocks = i == 0 and buffer.kind.endswith("_cache")
        if isinstance(dim, str) and (i or dim not in dims) and not blocks:
            raise ValueError(f"operand {name} has unknown dimension {dim}")
    packed = buffer.kind in ("weight", "constant") and buffer.dtype == "uint8"
    if packed or buffer.kind in ("input", "k_cache", "v_cache"):
        # Kernels know how these lie: they are handed over whole.
        whole = operand.shape == buffer.shape and operand.offset == 0
        if not whole or (buffer.dtype != "uint8" and not _contiguous(operand)):
            raise ValueError(f"operand {name} is not the whole of {buffer.name}")
        return
    shape = [dims[d] if isinstance(d, str) else d for d in operand.shape]
    if operand.offset < 0 or any(s < 0 for s in (*operand.strides, *shape)):
        raise ValueError(f"operand {name} reaches beyond its buffer")
    last = operand.offset + sum((n - 1) * s for n, s in zip(shape, operand.strides, strict=True) if n > 0)
    # As if it were dense too: kernels that ask for dense operands do not look at strides.
    if on_cpu:
        last = max(last, operand.offset + _extent(tuple(shape), dims, name) - 1)
    if (last + 1) * ITEMSIZE[buffer.dtype] > buffer.nbytes:
        raise ValueError(f"operand {name} reaches beyond its buffer")


def _contiguous(operand: Operand) -> bool:
    step = 1
    for dim, stride in zip(reversed(operand.shape[1:]), reversed(operand.strides[1:]), strict=True):
        if stride != step:
            return False
        assert isinstance(dim, int)
        step *= dim
    return not operand.strides or operand.strides[0] == step


def _extent(shape: tuple[Dim, ...], dims: Mapping[str, int], name: str) -> int:
    total = 1
    for dim in shape:
        if isinstance(dim, str) and dim not in dims:
            raise ValueError(f"{name} has unknown dimension {dim}")
        total *= dims[dim] if isinstance(dim, str) else dim
    if total > MAX_BYTES:
        raise ValueError(f"{name} is too large: {list(shape)}")
    return total
