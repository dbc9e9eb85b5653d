"""One call on the native runner, many times over copies of its weights and caches."""

from __future__ import annotations

import math
import time
from itertools import pairwise

import numpy as np
import torch

from pelton.builder.external import describe
from pelton.builder.signature import OperandSignature, Signature
from pelton.builder.timing_inputs import packed, random_values, step_input
from pelton.dtypes import ITEMSIZE
from pelton.engine.batch import AttentionMetadata, InputBatch
from pelton.engine.native_plan import NativePlan
from pelton.engine.plan import Buffer, Instruction, Operand, Plan, TacticChoice
from pelton.engine.shards import align
from pelton.ir.op import Op, get_op
from pelton.kernels import native
from pelton.kernels.layouts import LAYOUTS
from pelton.kernels.native import Array
from pelton.kernels.tactic import NodeSpec, Tactic, TensorSpec

#: Calls in a plan.
MAX_CALLS = 512
#: Calls whose mean is one sample.
SAMPLE = 12
ROWS = "rows"

_NUMPY = {"bfloat16": np.uint16}


class Bench:
    """A call's operands, and plans that run tactics on it many times in a row, each time on the next copy
    of the cold ones (weights, KV caches). Close it to end the plans' threads."""

    def __init__(self, signature: Signature, threads: int, working_set: int) -> None:
        self._signature = signature
        self._threads = threads
        self._op = get_op(signature.op)
        self._generator = torch.Generator().manual_seed(0)
        self._working_set = working_set
        self._warm: dict[str, Array] = {}
        self._cold: dict[tuple[int, str], list[Array]] = {}
        self._plans: dict[tuple[str, int], NativePlan] = {}
        self._step = _empty_step(signature.tokens)

    def seconds(self, tactic: Tactic, calls: int) -> list[float]:
        """Times of one call: means over parts of ``calls`` calls in a row.

        A part has ``SAMPLE`` calls or more: when the thread that reads the clock between two calls wakes
        late, others have done its next call already, so that single times may be far too short. Shorter
        plans are timed as a whole, from outside.
        """
        plan = self._plans.get((tactic.name, calls))
        if plan is None:
            plan = self._plans[tactic.name, calls] = self._plan(tactic, min(calls, MAX_CALLS))
        calls = len(plan.plan.instructions)
        parts = calls // SAMPLE
        if parts > 1:
            plan.start_profile()
        start = time.perf_counter()
        plan.run(self._step)
        if parts <= 1:
            return [(time.perf_counter() - start) / calls]
        single = [t.seconds for t in plan.profile()]
        ends = [calls * i // parts for i in range(parts + 1)]
        return [sum(single[a:b]) / (b - a) for a, b in pairwise(ends)]

    def close(self) -> None:
        """End all threads; idempotent."""
        for plan in self._plans.values():
            plan.close()
        self._plans.clear()

    def _copies(self, tactic: Tactic) -> int:
        """How many copies of the cold operands fill the working set."""
        nbytes = 1
        for i, o in enumerate(self._signature.inputs):
            if o is not None and o.kind == "weight":
                nbytes += LAYOUTS[tactic.weight_layouts.get(i, ROWS)].nbytes(o.dtype, o.shape)
            elif o is not None and o.kind == "cache":
                nbytes += math.prod(o.shape) * ITEMSIZE[o.dtype]
        return max(1, self._working_set // nbytes)

    # ---- The plan ----

    def _plan(self, tactic: Tactic, calls: int) -> NativePlan:
        buffers: list[Buffer] = []
        operands: list[Operand] = []
        data: dict[str, Array] = {}
        arena = 0

        def add(buffer: Buffer, shape: tuple[int, ...], strides: tuple[int, ...] = ()) -> int:
            if not strides:
                strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
            buffers.append(buffer)
            operands.append(Operand(name=buffer.name, buffer=len(buffers) - 1, shape=shape, strides=strides))
            return len(operands) - 1

        def in_arena(name: str, shape: tuple[int, ...], dtype: str) -> int:
            nonlocal arena
            nbytes = math.prod(shape) * ITEMSIZE[dtype]
            buffer = Buffer(name=name, kind="arena", dtype=dtype, shape=shape, offset=arena, nbytes=nbytes)
            arena += align(nbytes)
            return add(buffer, shape)

        unused = in_arena("logits", (1, 1), "float32")
        outputs = tuple(in_arena(f"out{i}", shape, dtype) for i, (shape, dtype) in enumerate(self._outputs()))
        made: dict[str, int] = {}
        copies = self._copies(tactic)
        instructions = []
        for call in range(calls):
            inputs: list[int] = []
            for i, o in enumerate(self._signature.inputs):
                if o is None:
                    inputs.append(-1)
                    continue
                is_cold = o.kind in ("weight", "cache")
                name = f"in{i}.{call % copies}" if is_cold else f"in{i}"
                if name not in made:
                    layout = tactic.weight_layouts.get(i, ROWS)
                    if is_cold:
                        data[name] = self._cold_copy(i, o, layout, call % copies)
                    else:
                        data[name] = self._warm_value(i, o)
                    made[name] = add(_buffer(name, o, layout), o.shape, o.strides)
                inputs.append(made[name])
            instructions.append(
                Instruction(
                    op=self._op.name,
                    name=f"call{call}",
                    inputs=tuple(inputs),
                    outputs=outputs,
                    attrs=dict(self._signature.attrs),
                    tactics=(TacticChoice(max_tokens=self._signature.tokens, tactic=tactic.name),),
                )
            )
        plan = Plan(
            dims={"T": self._signature.tokens, "B": 1, "N": 1},
            buffers=tuple(buffers),
            operands=tuple(operands),
            instructions=tuple(instructions),
            logits=unused,
            arena_bytes=arena,
            workspace_bytes=tactic.workspace(node_spec(self._signature), self._signature.tokens),
            external={} if tactic.kind == "native" else {tactic.name: describe(tactic, native.cpu_level())},
        )
        return NativePlan(plan, data, [], [], threads=self._threads)

    def _outputs(self) -> list[tuple[tuple[int, ...], str]]:
        """(shape, dtype) of each output, from the op's shape rule."""
        shapes = self._op.shape_rule(*_meta_arguments(self._op, self._signature))
        shapes = () if shapes is None else shapes if isinstance(shapes, tuple) else (shapes,)
        return [(tuple(s.shape), str(s.dtype).removeprefix("torch.")) for s in shapes]

    # ---- Operands ----

    def _warm_value(self, index: int, o: OperandSignature) -> Array:
        name = f"in{index}"
        if name not in self._warm:
            if o.kind == "value" and o.strides:
                extent = 1 + sum((n - 1) * s for n, s in zip(o.shape, o.strides, strict=True))
                self._warm[name] = self._random(o.dtype, (extent,))
            elif o.kind == "value":
                self._warm[name] = self._random(o.dtype, o.shape)
            else:
                assert self._signature.step is not None
                self._warm[name] = step_input(o, self._signature, self._signature.step)
        return self._warm[name]

    def _cold_copy(self, index: int, o: OperandSignature, layout: str, copy: int) -> Array:
        copies = self._cold.setdefault((index, layout), [])
        if not copies:
            first = packed(o, layout) if o.kind == "weight" else self._random(o.dtype, o.shape)
            copies.append(_aligned(first))
        while len(copies) <= copy:
            copies.append(_aligned(copies[0]))
        return copies[copy]

    def _random(self, dtype: str, shape: tuple[int, ...]) -> Array:
        values = random_values(dtype, shape, self._generator)
        array: Array = (values.view(torch.int16) if dtype == "bfloat16" else values).numpy()
        return array.view(_NUMPY.get(dtype, array.dtype))


def node_spec(signature: Signature) -> NodeSpec:
    """The call as ``Tactic.workspace`` sees it, at the signature's sizes."""

    def spec(o: OperandSignature | None) -> TensorSpec | None:
        if o is None:
            return None
        if o.kind == "weight":
            return TensorSpec.of_weight(o.dtype, o.shape)
        return TensorSpec(dtype=o.dtype, shape=o.shape)

    return NodeSpec(
        op=signature.op,
        inputs=tuple(map(spec, signature.inputs)),
        attrs=signature.attrs,
        activations=signature.activations,
    )


def _meta_arguments(op: Op, signature: Signature) -> list[object]:
    tensors = iter(signature.inputs)
    args: list[object] = []
    for parameter in op.torch_op._schema.arguments:
        if "Tensor" in str(parameter.type):
            o = next(tensors)
            dtype = "float32" if o is None or o.kind == "weight" else o.dtype
            args.append(
                None if o is None else torch.empty(o.shape, dtype=getattr(torch, dtype), device="meta")
            )
        else:
            args.append(signature.attrs.get(parameter.name, parameter.default_value))
    return args


def _buffer(name: str, o: OperandSignature, layout: str) -> Buffer:
    is_packed = o.kind == "weight" and (o.dtype not in ITEMSIZE or layout != ROWS)
    return Buffer(
        name=name,
        kind="weight" if is_packed else "constant",
        dtype="uint8" if is_packed else o.dtype,
        shape=o.shape,
        quant=o.dtype if o.kind == "weight" else "",
        layout=layout if o.kind == "weight" else "",
    )


def _aligned(array: Array) -> Array:
    memory = native.aligned_empty(array.nbytes)
    memory[:] = array.reshape(-1).view(np.uint8)
    return memory.view(array.dtype).reshape(array.shape)


def _empty_step(tokens: int) -> InputBatch:
    """A step of so many tokens; the plan reads nothing of it but its sizes."""
    zeros = np.zeros(tokens, np.int32)
    group = AttentionMetadata(
        slot_mapping_T=zeros,
        block_table_BM=np.zeros((1, 1), np.int32),
        cu_seqlens=np.array([0, tokens], np.int32),
        seq_lens_B=np.array([tokens], np.int32),
    )
    one = np.zeros(1, np.int32)
    return InputBatch(input_ids_T=zeros, positions_T=zeros, groups=(group,), logits_indices_N=one)
