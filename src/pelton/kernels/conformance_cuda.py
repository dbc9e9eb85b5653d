"""Holds CUDA tactics to their op's reference, on the op's own samples.

As ``conformance`` does for native ones. The launches that a tactic describes are run through Triton itself:
on a GPU, or in Triton's interpreter (``TRITON_INTERPRET=1``), which needs none. Outputs are pre-filled with
NaN between sentinels, the workspace is NaN, and inputs must come back unchanged.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pelton.ir.op import Op, Sample
from pelton.kernels.conformance import (
    ConformanceError,
    compare,
    node_spec,
    split_arguments,
    tolerance_of,
)
from pelton.kernels.gpu.cublaslt import CublasLt
from pelton.kernels.gpu.driver import Stream
from pelton.kernels.launch import COUNTERS, Argument, CallSpec, LaunchSpec, MatmulSpec, OperandSpec
from pelton.kernels.tactic import Tactic, all_tactics

#: Elements around an output that must stay as they were.
MARGIN = 64
_ELEMENTS = {"*fp32": torch.float32, "*fp16": torch.float16, "*bf16": torch.bfloat16, "*i32": torch.int32}
SENTINEL = 7.5


@dataclass(frozen=True)
class Case:
    """One sample for one tactic, its floats in ``dtype``."""

    op: Op
    sample: Sample
    tactic: Tactic
    dtype: str
    decode: bool = False
    """Run what the tactic has for steps in which every sequence has one token."""

    def __str__(self) -> str:
        return f"{self.tactic.name}/{self.dtype}{'/decode' if self.decode else ''}: {self.sample.name}"


def cases(op: Op, dtypes: tuple[str, ...], seed: int = 0) -> Iterator[Case]:
    """Every sample of ``op`` for every CUDA tactic that supports it, its floats in each of ``dtypes``.

    Triton's interpreter does not multiply matrices of bfloat16: it is given float16.
    """
    tactics = [t for t in all_tactics().values() if t.op == op.name and t.device == "cuda"]
    for sample in op.samples(torch.Generator().manual_seed(seed)) if tactics else ():
        for dtype in dtypes:
            if any(quant not in ("float32", "bfloat16") for quant in sample.quant.values()):
                continue
            cast = _cast(op, sample, getattr(torch, dtype))
            tokens = next(a.shape[0] for a in cast.args if isinstance(a, torch.Tensor))
            for tactic in tactics:
                fits = not tactic.largest_tokens or tokens <= tactic.largest_tokens
                if not fits or not tactic.supports(node_spec(op, cast)):
                    continue
                yield Case(op, cast, tactic, dtype)
                if tactic.decode is not None and _decodes(op, cast):
                    yield Case(op, cast, tactic, dtype, decode=True)


def _decodes(op: Op, sample: Sample) -> bool:
    """Whether each sequence of an attention's sample has one token."""
    names = [p.name for p in op.torch_op._schema.arguments]
    tokens, sequences = sample.args[0].shape[0], sample.args[names.index("seq_lens")].shape[0]
    return bool(tokens == sequences)


def _matmul(work: MatmulSpec, inputs: list[torch.Tensor | None], out: torch.Tensor) -> None:
    """A product by cuBLASLt itself."""
    x, weight = inputs[:2]
    assert x is not None
    assert weight is not None
    stream = Stream()
    cublas = CublasLt()
    torch.cuda.synchronize()
    cublas.matmul(
        stream,
        tokens=x.shape[0],
        n=work.n,
        k=work.k,
        x_row=work.x_row,
        dtype=work.dtype,
        out_dtype=work.out_dtype,
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        out=out.data_ptr(),
    )
    stream.wait()
    cublas.close()
    stream.close()


def _cast(op: Op, sample: Sample, dtype: Any) -> Sample:
    """The sample with its activations, weights and caches in ``dtype``; tables of angles stay float32."""
    keep = {"cos_sin", "inv_freq"}
    args = []
    for parameter, value in zip(op.torch_op._schema.arguments, sample.args, strict=False):
        convert = isinstance(value, torch.Tensor) and value.is_floating_point() and parameter.name not in keep
        args.append(_like(value, dtype) if convert else value)
    return Sample(args=tuple(args), name=sample.name)


def _like(tensor: torch.Tensor, dtype: Any) -> torch.Tensor:
    """``tensor`` as ``dtype`` with its strides."""
    if tensor.dtype == dtype:
        return tensor
    if (once := _once(tensor)) is not tensor:
        return _like(once, dtype).expand(tensor.shape)
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    out = torch.zeros(last, dtype=dtype).as_strided(tensor.shape, tensor.stride())
    return out.copy_(tensor)


def check(case: Case, device: str) -> float:
    """Run one case on ``device`` (``cpu``: the interpreter); the largest normalised error."""
    op, tactic = case.op, case.tactic
    tensors, attrs = split_arguments(op, case.sample.args)
    positions = [i for i, a in enumerate(op.torch_op._schema.arguments) if "Tensor" in str(a.type)]
    expected_args = [t.clone() if i in op.mutates else t for i, t in enumerate(case.sample.args)]
    expected = op.reference(*expected_args)
    expected = () if expected is None else expected if isinstance(expected, tuple) else (expected,)
    inputs = [None if t is None else _to_device(t, device) for t in tensors]
    before = [None if t is None else t.clone() for t in inputs]
    guarded = [_guarded(e, device) for e in expected]
    outputs = [view for _, view in guarded]
    tokens = next(t.shape[0] for t in tensors if t is not None)
    scratch = tactic.workspace(node_spec(op, case.sample), tokens) // 4
    workspace = torch.full((COUNTERS + scratch,), float("nan"), device=device)
    workspace[:COUNTERS] = 0.0
    call = CallSpec(
        inputs=tuple(None if t is None else _spec(t) for t in inputs),
        outputs=tuple(_spec(t) for t in outputs),
        attrs=attrs,
    )
    describe = tactic.decode if case.decode else tactic.launches
    assert describe is not None
    for work in describe(call, tokens):
        if isinstance(work, LaunchSpec):
            run(work, inputs, outputs, workspace)
        else:
            _matmul(work, inputs, workspace[COUNTERS:] if work.to_workspace else outputs[0])
    if workspace[:COUNTERS].any():
        raise ConformanceError(f"{case}: left counters that are not zero")
    for storage, view in guarded:
        edge = torch.cat([storage[:MARGIN], storage[MARGIN + view.numel() :]])
        if not (edge == SENTINEL).all():
            raise ConformanceError(f"{case}: wrote outside its memory")
    results = [o.cpu() for o in outputs]
    wanted = list(expected)
    for position, x, old in zip(positions, inputs, before, strict=True):
        if position in op.mutates:
            results.append(x.cpu())  # type: ignore[union-attr]
            wanted.append(expected_args[position])
        elif x is not None and not torch.equal(x.nan_to_num(3.0), old.nan_to_num(3.0)):  # type: ignore[union-attr]
            raise ConformanceError(f"{case}: changed input {position}")
    return max(
        (
            compare(got, want, tolerance_of_dtype(op, tactic, want, case.dtype), f"{case} result {i}")
            for i, (got, want) in enumerate(zip(results, wanted, strict=True))
        ),
        default=0.0,
    )


def tolerance_of_dtype(op: Op, tactic: Tactic, want: torch.Tensor, dtype: str) -> float:
    """float32 runs are held to float32's bound whatever precision the tactic is for."""
    return op.tolerance["float32"] if dtype == "float32" else tolerance_of(op, tactic, want)


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """An expanded tensor without its repetitions, any other as it is."""
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def _to_device(tensor: torch.Tensor, device: str) -> torch.Tensor:
    if (once := _once(tensor)) is not tensor:
        return _to_device(once, device).expand(tensor.shape)
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    out = torch.zeros(max(last, 1), dtype=tensor.dtype, device=device)
    return out.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def _guarded(like: torch.Tensor, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    storage = torch.full((like.numel() + 2 * MARGIN,), SENTINEL, dtype=like.dtype, device=device)
    view = storage[MARGIN : MARGIN + like.numel()].view(like.shape)
    view.fill_(float("nan"))
    return storage, view


def _spec(tensor: torch.Tensor) -> OperandSpec:
    return OperandSpec(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        aligned=tensor.data_ptr() % 16 == 0,
    )


def run(
    launch: LaunchSpec,
    inputs: list[torch.Tensor | None],
    outputs: list[torch.Tensor],
    workspace: torch.Tensor,
) -> None:
    """One launch through Triton; every size of its call is a number."""
    source = launch.kernel
    kernel = getattr(importlib.import_module(source.module), source.function)

    def value(argument: Argument, kind: str) -> Any:
        match argument.kind:
            case "input":
                return inputs[argument.index]
            case "output":
                return outputs[argument.index]
            case "workspace":
                return workspace[argument.offset // 4 :].view(_ELEMENTS[kind])
            case "int":
                return int(argument.value)
            case "float":
                return argument.value
        raise AssertionError(f"{argument} needs the sizes of a step")

    named: Mapping[str, Any] = {
        name: value(argument, kind)
        for (name, kind), argument in zip(source.types, launch.arguments, strict=True)
    }
    grid = tuple(sum(term.value({}) for term in axis) for axis in launch.grid)
    kernel[grid](**named, **dict(source.constants), num_warps=source.num_warps, num_stages=source.num_stages)
