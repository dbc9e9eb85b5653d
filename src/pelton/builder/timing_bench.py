"""One call on the native runner, many times over copies of its weights and caches."""

from __future__ import annotations

import math

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
from pelton.kernels.native import Array
from pelton.kernels.tactic import NodeSpec, Tactic, TensorSpec

MAX_COPIES = 512
ROWS = "rows"

_NUMPY = {"bfloat16": np.uint16}


class Bench:
    """The operands of a call, and plans that run a tactic on up to ``copies`` copies of the cold ones
    (weights, KV caches). Close it to end the plans' threads."""

    def __init__(self, signature: Signature, threads: int, working_set: int) -> None:
        self._signature = signature
        self._threads = threads
        self._op = get_op(signature.op)
        self._generator = torch.Generator().manual_seed(0)
        self._warm: dict[str, Array] = {}
        self._cold: dict[tuple[int, str], list[Array]] = {}
        self._plans: dict[tuple[str, int], NativePlan] = {}
        self._step = _empty_step(signature.tokens)
        self.copies = max(1, min(MAX_COPIES, working_set // max(1, self._cold_bytes())))

    def seconds(self, tactic: Tactic, copies: int) -> list[float]:
        """Times of ``copies`` calls in a row, each on operands of its own: their mean, as often.

        The times of single calls mislead on a busy machine. The thread that reads the clock may be late
        by most of a call; then that call seems long, and the next, which the other threads have done
        meanwhile, to take no time at all."""
        key = tactic.name, copies
        if key not in self._plans:
            self._plans[key] = self._plan(tactic, copies)
        plan = self._plans[key]
        plan.start_profile()
        plan.run(self._step)
        return [sum(t.seconds for t in plan.profile()) / copies] * copies

    def close(self) -> None:
        """End all threads; idempotent."""
        for plan in self._plans.values():
            plan.close()
        self._plans.clear()

    def _cold_bytes(self) -> int:
        cold = [o for o in self._signature.inputs if o is not None and o.kind in ("weight", "cache")]
        return sum(math.prod(o.shape) * ITEMSIZE.get(o.dtype, 1) for o in cold)

    # ---- The plan ----

    def _plan(self, tactic: Tactic, copies: int) -> NativePlan:
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
        shared: dict[int, int] = {}
        instructions = []
        for copy in range(copies):
            inputs: list[int] = []
            for i, o in enumerate(self._signature.inputs):
                if o is None:
                    inputs.append(-1)
                elif o.kind in ("weight", "cache"):
                    name = f"in{i}.{copy}"
                    layout = tactic.weight_layouts.get(i, ROWS)
                    data[name] = self._cold_copy(i, o, layout, copy)
                    inputs.append(add(_buffer(name, o, layout), o.shape))
                else:
                    if i not in shared:
                        data[f"in{i}"] = self._warm_value(i, o)
                        shared[i] = add(_buffer(f"in{i}", o, ROWS), o.shape, o.strides)
                    inputs.append(shared[i])
            instructions.append(
                Instruction(
                    op=self._op.name,
                    name=f"call{copy}",
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
