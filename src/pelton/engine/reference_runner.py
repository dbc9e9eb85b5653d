"""Runs a plan with the ops' references: the definition of what a plan means, and slow.

One Python loop over the instructions. Intermediate tensors live in the planned arena, as in the
native runner, so a wrong memory plan shows here too. Torch is imported when a runner is made.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pelton.engine.batch import InputBatch, StepResult
from pelton.engine.kv_cache import KVCaches
from pelton.engine.plan import Instruction, Operand, Plan, producers
from pelton.engine.shards import Shards
from pelton.engine.step_inputs import step_dims, step_inputs
from pelton.errors import EngineError

#: Unpacked weights are kept when all of them take at most this many bytes, else made at each use.
KEEP_WEIGHTS_BYTES = 1_000_000_000


class ReferenceRunner:
    """Executes ``plan`` over ``caches`` with weights unpacked to float32.

    Block-quantised products are computed exactly, whatever the engine's ``activations``, but where the
    plan itself quantises their inputs (``quantize_q8`` and its like). ``poison``
    fills the arena with NaN before each step, so that reading what was never written shows (tests).
    """

    def __init__(
        self, plan: Plan, weights: Shards, caches: KVCaches, threads: int, *, poison: bool = False
    ) -> None:
        import torch

        from pelton.ir.op import all_ops

        for op, module in plan.op_modules.items():
            import_op(op, module)

        self._torch = torch
        self._plan = plan
        self._weights = weights
        self._threads = threads
        self._poison = poison
        self._arena = torch.empty(plan.arena_bytes, dtype=torch.uint8)
        self._fixed: dict[int, Any] = {}
        values = sum(int(np.prod(weights.meta[b.name].shape)) for b in plan.buffers if b.layout)
        self._keep = 4 * values <= KEEP_WEIGHTS_BYTES
        for index, buffer in enumerate(plan.buffers):
            if buffer.kind in ("k_cache", "v_cache"):
                cache = (caches.k if buffer.kind == "k_cache" else caches.v)[buffer.layer]
                tensor = torch.from_numpy(cache)
                self._fixed[index] = tensor.view(getattr(torch, buffer.dtype))
        self.observe: Callable[[int, list[Any]], None] | None = None
        """Called after each instruction with its index and its outputs' memory, which it may overwrite."""
        producer = producers(plan)
        self._made: dict[int, list[int]] = {}
        """Operands, views too, that each instruction's results can be taken as."""
        for index, operand in enumerate(plan.operands):
            if operand.buffer in producer:
                self._made.setdefault(producer[operand.buffer], []).append(index)
        self._ops = all_ops()
        self._order = {name: _argument_order(op.torch_op) for name, op in self._ops.items()}

    def run(self, batch: InputBatch, outputs: Sequence[str]) -> StepResult:
        """Compute one step; ``outputs`` names operands to copy when they are produced."""
        torch = self._torch
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                return self._run(batch, frozenset(outputs))
        finally:
            torch.set_num_threads(threads)

    def _run(self, batch: InputBatch, wanted: frozenset[str]) -> StepResult:
        torch, plan = self._torch, self._plan
        dims = step_dims(batch)
        if self._poison:
            self._arena.fill_(0xFF)
        inputs = {name: torch.from_numpy(array) for name, array in step_inputs(batch).items()}
        taken: dict[str, npt.NDArray[np.generic]] = {}
        for position, instruction in enumerate(plan.instructions):
            results = self._call(instruction, dims, inputs)
            views = []
            for index, value in zip(instruction.outputs, results, strict=True):
                operand = plan.operands[index]
                views.append(self._view(operand, dims, inputs))
                views[-1].copy_(value)
            for index in self._made.get(position, ()):
                if plan.operands[index].name in wanted:
                    taken[plan.operands[index].name] = self._array(plan.operands[index], dims, inputs)
            if self.observe is not None:
                self.observe(position, views)
        logits = self._view(plan.operands[plan.logits], dims, inputs).numpy()
        return StepResult(logits_NV=logits, outputs=taken)

    def _call(
        self, instruction: Instruction, dims: dict[str, int], inputs: dict[str, Any]
    ) -> tuple[Any, ...]:
        tensors = iter(instruction.inputs)
        args: list[Any] = []
        for name, is_tensor, default in self._order[instruction.op]:
            if not is_tensor:
                args.append(instruction.attrs.get(name, default))
                continue
            index = next(tensors, -1)
            args.append(None if index < 0 else self._view(self._plan.operands[index], dims, inputs))
        result = self._ops[instruction.op].reference(*args)
        if result is None:
            return ()
        return result if isinstance(result, tuple) else (result,)

    def _view(self, operand: Operand, dims: dict[str, int], inputs: dict[str, Any]) -> Any:
        """The operand as a torch tensor over its memory, at this step's sizes."""
        torch, buffer = self._torch, self._plan.buffers[operand.buffer]
        if buffer.kind == "input":
            return inputs[buffer.name]
        if buffer.kind in ("k_cache", "v_cache"):
            return self._fixed[operand.buffer]
        shape = [dims[d] if isinstance(d, str) else d for d in operand.shape]
        if buffer.kind == "arena":
            dtype = getattr(torch, buffer.dtype)
            flat = self._arena[buffer.offset : buffer.offset + buffer.nbytes].view(dtype)
        else:
            flat = self._weight(operand.buffer)
        return flat.as_strided(shape, operand.strides, flat.storage_offset() + operand.offset)

    def _array(
        self, operand: Operand, dims: dict[str, int], inputs: dict[str, Any]
    ) -> npt.NDArray[np.generic]:
        """A contiguous copy; bfloat16 as its bits in uint16."""
        copy = self._view(operand, dims, inputs).contiguous().clone()
        if copy.dtype == self._torch.bfloat16:
            bits: npt.NDArray[np.generic] = copy.view(self._torch.int16).numpy().view(np.uint16)
            return bits
        array: npt.NDArray[np.generic] = copy.numpy()
        return array

    def _weight(self, index: int) -> Any:
        if index not in self._fixed:
            from pelton.kernels.layouts import LAYOUTS

            buffer = self._plan.buffers[index]
            meta = self._weights.meta[buffer.name]
            values = LAYOUTS[meta.layout].unpack(self._weights[buffer.name], meta.quant, meta.shape)
            if not values.flags.writeable:  # a view of the mapped file
                values = values.copy()
            flat = self._torch.from_numpy(np.ascontiguousarray(values)).reshape(-1)
            if not self._keep:
                return flat
            self._fixed[index] = flat
        return self._fixed[index]

    def close(self) -> None:
        """Free what the runner holds."""
        self._fixed.clear()


def import_op(op: str, module: str) -> None:
    """Import the module that registers an op from outside Pelton. Raises ``EngineError``."""
    try:
        importlib.import_module(module)
    except Exception as error:
        raise EngineError(
            f"the engine's op {op} is defined in {module}, which cannot be imported here "
            f"({type(error).__name__}: {error}); install the package that has it"
        ) from error


def _argument_order(torch_op: Any) -> list[tuple[str, bool, Any]]:
    """(name, is a tensor, default) of each argument of an op, in the schema's order."""
    return [
        (arg.name, "Tensor" in str(arg.type), arg.default_value if arg.has_default_value() else None)
        for arg in torch_op._schema.arguments
    ]
