"""Holds CUDA tactics to their op's reference, on the op's own samples.

As ``conformance`` does for native ones. A sample becomes a call over a step's dimensions, as engines have
them, and what the tactic launches for it runs in Triton's interpreter (``TRITON_INTERPRET=1``; no GPU is
needed) or, by ``builder.cuda_conformance``, compiled on a GPU. Outputs are pre-filled with NaN between
sentinels, the workspace is NaN, and inputs must come back unchanged.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pelton.dtypes import GPU_BLOCK_TYPES, is_dense
from pelton.ir.blocks import dequantize
from pelton.ir.op import Op, Sample
from pelton.ir.tensors import HostTensor
from pelton.kernels.conformance import (
    ConformanceError,
    compare,
    host_tensor,
    node_spec,
    split_arguments,
    tolerance_of,
)
from pelton.kernels.launch import COUNTERS, Argument, CallSpec, KernelSource, LaunchSpec, OperandSpec, Work
from pelton.kernels.layouts import LAYOUTS
from pelton.kernels.tactic import FP8_SM, Tactic, all_tactics

#: Elements around an output that must stay as they were.
MARGIN = 64
_ELEMENTS = {"*fp32": torch.float32, "*fp16": torch.float16, "*bf16": torch.bfloat16, "*i32": torch.int32}
_ELEMENTS["*u8"] = torch.uint8
SENTINEL = 7.5
#: Operands that are weights, by parts of their names: their sizes are fixed when an engine is built.
_FIXED = ("weight", "bias", "inv_freq", "scales", "zeros", "order", "sinks")


@dataclass(frozen=True)
class Case:
    """One sample for one tactic, its floats in ``dtype``."""

    op: Op
    sample: Sample
    tactic: Tactic
    dtype: str
    packed: Mapping[int, HostTensor] = field(default_factory=dict)
    """Weights that stay packed, by argument; the sample has the values that they stand for."""
    decode: bool = False
    """Run what the tactic has for steps in which every sequence has one token."""

    def __str__(self) -> str:
        return f"{self.tactic.name}/{self.dtype}{'/decode' if self.decode else ''}: {self.sample.name}"


@dataclass(frozen=True, kw_only=True)
class CaseCall:
    """A case as a step would run it."""

    spec: CallSpec
    dims: Mapping[str, int]
    """The sizes that ``spec`` has names for; T, tokens, among them."""
    works: tuple[Work, ...]
    inputs: tuple[torch.Tensor | None, ...]
    """On the host."""
    outputs: tuple[torch.Tensor, ...]
    """What the reference says, on the host."""
    workspace: int
    """Bytes behind the counters."""
    wanted: Mapping[int, torch.Tensor]
    """By input: what a mutated one must be afterwards."""


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """What a run left behind, on the host."""

    outputs: Sequence[torch.Tensor]
    inputs: Sequence[torch.Tensor | None]
    counters_zero: bool
    within: bool
    """Whether the memory around every operand is as it was."""


Runner = Callable[[Case, CaseCall], CaseResult]


def cases(op: Op, dtypes: tuple[str, ...], seed: int = 0, sm: int = 0) -> Iterator[Case]:
    """Every sample of ``op`` for every CUDA tactic that supports it, its floats in each of ``dtypes``.

    ``sm``: the GPU's compute capability, for tactics of one alone; 0: none, for the interpreter.

    Triton's interpreter does not multiply matrices of bfloat16: it is given float16.
    """
    known = all_tactics().values()
    tactics = [t for t in known if t.op == op.name and t.device == "cuda" and t.sm in (0, sm)]
    if 0 < sm < FP8_SM:
        tactics = [t for t in tactics if t.precision != "fp8"]
    samples = op.samples(torch.Generator().manual_seed(seed)) if tactics else ()
    for number, sample in enumerate(samples):
        if 0 < sm < FP8_SM and any(_is_fp8(a) for a in sample.args):
            continue
        for dtype in dtypes:
            if any(quant not in ("float32", "bfloat16", *GPU_BLOCK_TYPES) for quant in sample.quant.values()):
                continue
            quants = {i: quant for i, quant in sample.quant.items() if not is_dense(quant)}
            cast = _cast(op, replace(sample, quant=quants), dtype, f"{number} {sample.name}")
            spec, asked = node_spec(op, cast), {"fp8", *(t.precision for t in tactics)}
            specs = {activations: replace(spec, activations=activations) for activations in asked}
            own = [t for t in tactics if t.takes(_tokens(cast)) and _worth(t, quants.values(), dtype, sm)]
            # Of some weights tactics with exact inputs too are for builds whose larger steps round inputs.
            fitting = [t for t in own if any(t.supports(specs[a]) for a in (t.precision, "fp8"))]
            fitting = [t for t in fitting if not _has_stand_in(t, fitting)]
            packed = {i: host_tensor(sample.args[i], quant) for i, quant in quants.items() if fitting}
            for i, weight in packed.items():
                cast.args[i].copy_(torch.from_numpy(dequantize(weight)))
            for tactic in fitting:
                yield Case(op, cast, tactic, dtype, packed)
                if tactic.decode is not None and _decodes(op, cast):
                    yield Case(op, cast, tactic, dtype, packed, decode=True)


def _is_fp8(argument: object) -> bool:
    """Whether ``argument`` holds or asks for fp8."""
    if isinstance(argument, torch.Tensor):
        return bool(argument.dtype == torch.float8_e4m3fn)
    return argument == "fp8"


def _decodes(op: Op, sample: Sample) -> bool:
    """Whether each sequence of an attention's sample has one token."""
    names = [p.name for p in op.torch_op._schema.arguments]
    tokens, sequences = sample.args[0].shape[0], sample.args[names.index("seq_lens")].shape[0]
    return bool(tokens == sequences)


def _tokens(sample: Sample) -> int:
    return int(next(a.shape[0] for a in sample.args if isinstance(a, torch.Tensor)))


def _worth(tactic: Tactic, quants: Collection[str], dtype: str, sm: int) -> bool:
    """Of most block types one type of activations will do, and the tactics for any number of tokens."""
    if set(quants) <= {"int4_g128", "fp8_row"}:
        return True
    few = bool(tactic.largest_tokens) and not tactic.sm and tactic.precision not in ("int8", "fp8")
    return dtype == ("bfloat16" if sm else "float32") and not few


def _has_stand_in(tactic: Tactic, others: Sequence[Tactic]) -> bool:
    """Whether the tactic for steps of any size stands for this one: batch-invariant ones of sm_90 differ in
    tiles, which here go by a sample's tokens (``call_of``)."""
    if not (tactic.batch_invariant and tactic.sm and tactic.largest_tokens):
        return False
    whole = re.sub(rf"(invariant){tactic.largest_tokens}", r"\1", tactic.name)
    return any(other.name == whole for other in others)


def _cast(op: Op, sample: Sample, dtype_name: str, name: str) -> Sample:
    """The sample, called ``name``, with its activations, weights and caches in ``dtype``.

    Tables of angles, scales of caches and vectors that engines store as float32 stay so, caches of 8 bits as
    they are.
    """
    dtype = getattr(torch, dtype_name)
    keep = {"cos_sin", "inv_freq", "k_scale", "v_scale", "k_shift", "k_queries"}
    keep |= {"bias", "norm_weight", "sinks"}
    args = []
    for parameter, value in zip(op.torch_op._schema.arguments, sample.args, strict=False):
        convert = isinstance(value, torch.Tensor) and value.is_floating_point() and parameter.name not in keep
        convert = convert and value.dtype != torch.float8_e4m3fn
        args.append(_like(value, dtype) if convert else value)
    args = [a.clone() if i in sample.quant else a for i, a in enumerate(args)]
    return Sample(args=tuple(args), name=name, quant=sample.quant)


def _like(tensor: torch.Tensor, dtype: Any) -> torch.Tensor:
    """``tensor`` as ``dtype`` with its strides."""
    if tensor.dtype == dtype:
        return tensor
    if (once := _once(tensor)) is not tensor:
        return _like(once, dtype).expand(tensor.shape)
    out = torch.zeros(span(tensor), dtype=dtype).as_strided(tensor.shape, tensor.stride())
    return out.copy_(tensor)


def call_of(case: Case) -> CaseCall:
    """The case with names for its dynamic sizes, the reference's results and what the tactic launches."""
    op, tactic = case.op, case.tactic
    tensors, attrs = split_arguments(op, case.sample.args)
    names = [a.name for a in op.torch_op._schema.arguments if "Tensor" in str(a.type)]
    positions = [i for i, a in enumerate(op.torch_op._schema.arguments) if "Tensor" in str(a.type)]
    arguments = [t.clone() if i in op.mutates else t for i, t in enumerate(case.sample.args)]
    expected = op.reference(*arguments)
    expected = () if expected is None else expected if isinstance(expected, tuple) else (expected,)
    tokens = next(t.shape[0] for t in tensors if t is not None)
    # Not all rows are wanted: in decode steps of all rows take_rows is not launched.
    dims = {"T": tokens, "B": tokens if case.decode else -1, "N": -1}

    def spec(tensor: torch.Tensor, fixed: bool = False) -> OperandSpec:
        shape: list[int | str] = list(tensor.shape)
        if shape and not fixed:
            shape[0] = "T" if shape[0] == tokens else f"D{shape[0]}"
            dims[str(shape[0])] = tensor.shape[0]
        return OperandSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(shape),
            strides=tuple(tensor.stride()),
        )

    def is_fixed(name: str, tensor: torch.Tensor) -> bool:
        """Weights, and what ops of two operands repeat for each row."""
        repeated = "y" in names and (tensor.shape[0] == 1 or tensor.dim() < max(t.dim() for t in tensors))
        return repeated or any(part in name for part in _FIXED)

    inputs = tuple(
        None if t is None else spec(t, is_fixed(name, t)) for name, t in zip(names, tensors, strict=True)
    )
    for i, weight in case.packed.items():
        tensors[i] = torch.from_numpy(LAYOUTS[tactic.weight_layouts[i]].pack(weight))
        logical = inputs[i]
        assert logical is not None
        inputs = (*inputs[:i], replace(logical, dtype="uint8", quant=weight.quant), *inputs[i + 1 :])
    call = CallSpec(inputs=inputs, outputs=tuple(spec(t) for t in expected), attrs=attrs)
    describe = tactic.decode if case.decode else tactic.launches
    assert describe is not None
    # A tensor map describes all rows of the largest step: here, those that are there.
    largest = tokens if tactic.sm else tactic.largest_tokens or tokens
    return CaseCall(
        spec=call,
        dims=dims,
        works=describe(call, largest),
        inputs=tuple(tensors),
        outputs=tuple(expected),
        workspace=tactic.workspace(node_spec(op, case.sample), largest),
        wanted={n: arguments[p] for n, p in enumerate(positions) if p in op.mutates},
    )


def check(case: Case, runner: Runner | None = None) -> float:
    """Run one case (without ``runner`` in the interpreter); the largest normalised error.

    Raises ``ConformanceError``.
    """
    call = call_of(case)
    result = (runner or interpret)(case, call)
    if not result.counters_zero:
        raise ConformanceError(f"{case}: left counters that are not zero")
    if not result.within:
        raise ConformanceError(f"{case}: wrote outside its memory")
    # What is halfway between two codes may become either.
    codes = split_arguments(case.op, case.sample.args)[1].get("y_codes")
    allowed = case.op.tolerance[str(codes)] if codes else None
    pairs = [(got, want, allowed) for got, want in zip(result.outputs, call.outputs, strict=True)]
    for i, (before, after) in enumerate(zip(call.inputs, result.inputs, strict=True)):
        if before is None or after is None:
            continue
        if i in call.wanted:
            pairs.append((after, call.wanted[i], None))
        elif not torch.equal(_bits(before), _bits(after)):
            raise ConformanceError(f"{case}: changed input {i}")
    return max(
        (
            compare(got, want, allowed or tolerance_of_dtype(case, want), f"{case} result {i}")
            for i, (got, want, allowed) in enumerate(pairs)
        ),
        default=0.0,
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def tolerance_of_dtype(case: Case, want: torch.Tensor) -> float:
    """float32 runs are held to float32's bound whatever precision the tactic is for."""
    op = case.op
    exact = case.dtype == "float32" and case.tactic.precision not in ("int8", "fp8")
    return op.tolerance["float32"] if exact else tolerance_of(op, case.tactic, want)


def span(tensor: torch.Tensor) -> int:
    """Elements from a tensor's first to its last in memory."""
    return int(sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))) + 1


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """An expanded tensor without its repetitions, any other as it is."""
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def flat_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory from its first element to its last, gaps zero."""
    flat = torch.zeros(max(span(tensor), 1), dtype=tensor.dtype)
    once = _once(tensor)
    flat.as_strided(once.shape, once.stride()).copy_(once)
    return flat


# ---- Triton's interpreter ----


def interpret(case: Case, call: CaseCall) -> CaseResult:
    """A ``Runner`` on the host."""
    inputs = [None if t is None else flat_copy(t).as_strided(t.shape, t.stride()) for t in call.inputs]
    guarded = [_guarded(t) for t in call.outputs]
    outputs = [view for _, view in guarded]
    workspace = torch.full((COUNTERS + call.workspace // 4,), float("nan"))
    workspace[:COUNTERS] = 0.0
    for work in call.works:
        if not isinstance(work, LaunchSpec):
            raise ConformanceError(f"{case}: cuBLASLt needs a GPU")
        run(work, inputs, outputs, workspace, call.dims)
    edges = (torch.cat([all_of[:MARGIN], all_of[MARGIN + view.numel() :]]) for all_of, view in guarded)
    return CaseResult(
        outputs=outputs,
        inputs=inputs,
        counters_zero=not workspace[:COUNTERS].any(),
        within=all(bool((edge == edge.new_full((), SENTINEL)).all()) for edge in edges),
    )


def _guarded(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    storage = torch.full((like.numel() + 2 * MARGIN,), SENTINEL, dtype=like.dtype)
    view = storage[MARGIN : MARGIN + like.numel()].view(like.shape)
    view.fill_(float("nan") if view.is_floating_point() else -128)  # which is no code
    return storage, view


def run(
    launch: LaunchSpec,
    inputs: Sequence[torch.Tensor | None],
    outputs: Sequence[torch.Tensor],
    workspace: torch.Tensor,
    dims: Mapping[str, int],
) -> None:
    """One launch through Triton at the sizes ``dims``."""
    source = launch.kernel
    if not isinstance(source, KernelSource):
        raise ConformanceError(f"{source.function}: CUDA C++ needs a GPU")
    kernel = getattr(importlib.import_module(source.module), source.function)

    def value(argument: Argument, kind: str) -> Any:
        match argument.kind:
            case "input":
                return inputs[argument.index]
            case "output":
                return outputs[argument.index]
            case "workspace":
                return workspace[argument.offset // 4 :].view(_ELEMENTS[kind])
            case "dim":
                return dims[argument.dim]
            case "int":
                return int(argument.value)
            case "float":
                return argument.value
            case "tensor_map" | "ahead":
                raise AssertionError(f"Triton's kernels take no {argument.kind}")

    named: Mapping[str, Any] = {
        name: value(argument, kind)
        for (name, kind), argument in zip(source.types, launch.arguments, strict=True)
    }
    grid = tuple(sum(term.value(dims) for term in axis) for axis in launch.grid)
    kernel[grid](**named, **dict(source.constants), num_warps=source.num_warps, num_stages=source.num_stages)
