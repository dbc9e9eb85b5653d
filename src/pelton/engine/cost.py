"""What an instruction must move and compute in a step, from the plan alone.

Bytes are compulsory traffic: each weight once as it is packed, each cached key and value that some query
sees once, each activation once. Operations are those of matrix products and attention, a multiply-add
counting as two; everything else is counted as none.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pelton.dtypes import ITEMSIZE
from pelton.engine.plan import Buffer, Dim, Instruction, Operand, Plan
from pelton.kernels.layouts import LAYOUTS
from pelton.kernels.tactic import all_tactics

#: Ops that read only the rows they return: of a weight (embedding) or of their first input.
_GATHERS = ("embedding", "take_rows")


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The sizes of a step: for each sequence its tokens in the step and its keys after it; rows of logits."""

    new: tuple[int, ...]
    keys: tuple[int, ...]
    logits: int

    @property
    def dims(self) -> dict[str, int]:
        """Value of each dynamic dimension but the caches'."""
        return {"T": sum(self.new), "B": len(self.new), "B+1": len(self.new) + 1, "N": self.logits}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one instruction in one step, or of several added up."""

    weights: int = 0
    """Bytes of packed weights read."""
    kv: int = 0
    """Bytes of keys and values read or written."""
    activations: int = 0
    """Bytes of intermediate tensors read and written; in a small step they stay in the caches."""
    operations: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            weights=self.weights + other.weights,
            kv=self.kv + other.kv,
            activations=self.activations + other.activations,
            operations=self.operations + other.operations,
        )

    @property
    def memory(self) -> int:
        """Bytes that cannot be in a cache from before: weights, keys and values."""
        return self.weights + self.kv


def step_costs(plan: Plan, step: StepShape) -> list[Cost]:
    """The cost of each instruction of ``plan`` in a step of that shape."""
    return [_cost(plan, instruction, step) for instruction in plan.instructions]


def runs_int8(plan: Plan, instruction: Instruction, tactic: str) -> bool:
    """Whether the instruction's products are of int8 values: it reads packed ones, or makes them itself."""
    inputs = [plan.buffers[plan.operands[i].buffer] for i in instruction.inputs if i >= 0]
    packed = any(b.kind == "arena" and b.dtype == "uint8" for b in inputs)
    return packed or precisions().get(tactic) == "int8"


@functools.cache
def precisions() -> Mapping[str, str]:
    """The precision of every tactic by its name: float32, int8, ..."""
    return {name: tactic.precision for name, tactic in all_tactics().items()}


def _cost(plan: Plan, instruction: Instruction, step: StepShape) -> Cost:
    dims = step.dims
    operands = [plan.operands[i] for i in instruction.inputs if i >= 0]
    buffers = [plan.buffers[o.buffer] for o in operands]
    outputs = [plan.operands[i] for i in instruction.outputs]
    written = sum(_bytes(o, plan, dims) for o in outputs)
    gathers = instruction.op in _GATHERS
    weights = kv = operations = 0
    activations = written
    tokens = _rows(operands[0], dims) if operands else 0
    for i, (operand, buffer) in enumerate(zip(operands, buffers, strict=True)):
        if buffer.kind in ("weight", "constant"):
            if gathers:
                weights += tokens * LAYOUTS["rows"].nbytes(buffer.quant, (1, _size(buffer.shape[-1], dims)))
            else:
                weights += buffer.nbytes
                if len(buffer.shape) == 2:
                    rows, cols = (_size(d, dims) for d in buffer.shape)
                    operations += 2 * tokens * rows * cols
        elif buffer.kind in ("arena", "input"):
            activations += written if gathers and i == 0 else _bytes(operand, plan, dims)
    caches = [b for b in buffers if b.kind in ("k_cache", "v_cache")]
    if caches:
        reads = any(b.name.startswith("block_table") for b in buffers)
        window = int(instruction.attrs.get("window", 0))
        rows = sum(_keys_read(n, k, window) for n, k in zip(step.new, step.keys, strict=True))
        kv = sum(_row_bytes(b) for b in caches) * (rows if reads else dims["T"])
        if reads:
            pairs = sum(_pairs(n, k, window) for n, k in zip(step.new, step.keys, strict=True))
            heads = [_size(d, dims) for d in outputs[0].shape[1:]] if outputs else []
            operations += 4 * pairs * _product(heads)
    return Cost(weights=weights, kv=kv, activations=activations, operations=operations)


def _keys_read(new: int, keys: int, window: int) -> int:
    """Keys that some of a sequence's ``new`` queries sees."""
    return min(keys, new + window - 1) if window and new else keys if new else 0


def _pairs(new: int, keys: int, window: int) -> int:
    """Pairs of a query and a key it sees: the query at position p sees p + 1, ``window`` at most."""
    if not window:
        return new * keys - new * (new - 1) // 2
    return sum(min(p + 1, window) for p in range(keys - new, keys))


def _row_bytes(cache: Buffer) -> int:
    """Bytes of one token's keys (or values) in a layer; the cache is (blocks, heads, block_size, dim)."""
    _, heads, _, dim = cache.shape
    assert isinstance(heads, int) and isinstance(dim, int)
    return heads * dim * ITEMSIZE[cache.dtype]


def _bytes(operand: Operand, plan: Plan, dims: Mapping[str, int]) -> int:
    sizes = [_size(d, dims) for d in operand.shape]
    return _product(sizes) * ITEMSIZE[plan.buffers[operand.buffer].dtype]


def _rows(operand: Operand, dims: Mapping[str, int]) -> int:
    return _size(operand.shape[0], dims) if operand.shape else 1


def _size(dim: Dim, dims: Mapping[str, int]) -> int:
    return dims[dim] if isinstance(dim, str) else dim


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
