"""Triton tactics from outside Pelton: checked by Triton's interpreter, compiled to cubins without a GPU.

A launcher takes the op's arguments by the schema's names as torch tensors and numbers, and ``out``, and
launches ``@triton.jit`` kernels: ``kernel[grid](x, out, ..., BLOCK=1024)``. Engines for GPUs will carry the
cubins; no engine does yet.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pelton.errors import BuildError, MissingDependencyError
from pelton.ir.op import Op, Sample
from pelton.kernels.conformance import compare, split_arguments, tolerance_of
from pelton.kernels.tactic import Tactic

_POINTERS = {
    "float32": "*fp32",
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "int32": "*i32",
    "int64": "*i64",
    "int8": "*i8",
    "uint8": "*u8",
}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel launch that a launcher made."""

    kernel: Any
    """The ``@triton.jit`` function."""
    grid: tuple[int, ...]
    args: Mapping[str, Any]
    """By parameter; tensors are on the meta device."""
    options: Mapping[str, Any]
    """``num_warps``, ``num_stages``, ..."""


@dataclass(frozen=True, kw_only=True)
class Cubin:
    """A compiled kernel."""

    name: str
    code: bytes
    shared_bytes: int
    num_warps: int


def check(op: Op, tactic: Tactic, sample: Sample) -> float:
    """Run the launcher in Triton's interpreter; the normalised error, or ``ConformanceError``.

    TRITON_INTERPRET=1 must have been set when the kernels were defined.
    """
    tensors, attrs = split_arguments(op, sample.args)
    arguments = _named(op, tensors, attrs)
    shapes = op.shape_rule(*sample.args)
    outputs = [torch.full(s.shape, float("nan"), dtype=s.dtype) for s in _sequence(shapes)]
    assert tactic.implementation is not None
    tactic.implementation(**arguments, out=outputs[0] if len(outputs) == 1 else tuple(outputs))
    expected = _sequence(op.reference(*sample.args))
    return max(
        compare(got, want, tolerance_of(op, tactic, want), f"{tactic.name}: {sample.name}")
        for got, want in zip(outputs, expected, strict=True)
    )


def launches(op: Op, tactic: Tactic, args: Sequence[Any]) -> list[Launch]:
    """What the launcher launches for ``args``; tensors may be on the meta device, nothing is computed."""
    jit = _triton("runtime.jit")
    tensors, attrs = split_arguments(op, [_to_meta(a) for a in args])
    outputs = [t.new_empty(t.shape) for t in _sequence(op.shape_rule(*[_to_meta(a) for a in args]))]
    assert tactic.implementation is not None
    with _recording(jit.JITFunction) as made:
        tactic.implementation(
            **_named(op, tensors, attrs), out=outputs[0] if len(outputs) == 1 else tuple(outputs)
        )
    if not made:
        raise BuildError(f"the Triton tactic {tactic.name} launches no kernel")
    return made


def compile_cubin(launch: Launch, *, capability: int) -> Cubin:
    """The launch's kernel for a compute capability (90: H100, H200). Raises ``BuildError``."""
    compiler, backend = _triton("compiler"), _triton("backends.compiler")
    signature = {name: _type_of(launch.kernel, name, value) for name, value in launch.args.items()}
    constants = {n: v for n, v in launch.args.items() if signature[n] == "constexpr"}
    source = compiler.ASTSource(fn=launch.kernel, signature=signature, constexprs=constants)
    try:
        made = compiler.compile(
            source, target=backend.GPUTarget("cuda", capability, 32), options=dict(launch.options)
        )
    except Exception as error:
        reason = next(
            (line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__
        )
        raise BuildError(
            f"the Triton kernel {launch.kernel.__name__} does not compile: {reason.strip()}"
        ) from error
    return Cubin(
        name=made.metadata.name,
        code=made.asm["cubin"],
        shared_bytes=made.metadata.shared,
        num_warps=made.metadata.num_warps,
    )


@contextmanager
def _recording(jit_function: Any) -> Iterator[list[Launch]]:
    """Within, ``kernel[grid](...)`` is noted instead of run."""
    made: list[Launch] = []
    run = jit_function.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        named = dict(zip(self.arg_names, args, strict=False))
        named |= {k: v for k, v in kwargs.items() if k in self.arg_names}
        for parameter in self.params:
            if parameter.name not in named and parameter.has_default:
                named[parameter.name] = parameter.default
        grid = grid(named) if callable(grid) else grid
        grid = (grid,) if isinstance(grid, int) else tuple(grid)
        options = {k: v for k, v in kwargs.items() if k not in self.arg_names}
        made.append(Launch(kernel=self, grid=grid, args=named, options=options))

    jit_function.run = record
    try:
        yield made
    finally:
        jit_function.run = run


def _type_of(kernel: Any, name: str, value: Any) -> str:
    if kernel.params[kernel.arg_names.index(name)].is_constexpr or value is None:
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return _POINTERS[str(value.dtype).removeprefix("torch.")]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def _named(op: Op, tensors: Sequence[Any], attrs: Mapping[str, Any]) -> dict[str, Any]:
    rest = iter(tensors)
    return {a.name: attrs[a.name] if a.name in attrs else next(rest) for a in op.torch_op._schema.arguments}


def _sequence(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _triton(module: str) -> Any:
    try:
        return importlib.import_module(f"triton.{module}")
    except ImportError as error:
        raise MissingDependencyError(
            f"Triton is needed to compile Triton tactics ({error}); install it with: pip install triton"
        ) from error
