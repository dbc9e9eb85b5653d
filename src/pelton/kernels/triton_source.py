"""Triton tactics from outside Pelton: a launcher, recorded, becomes the launches that an engine keeps.

A launcher takes the op's arguments by the schema's names as torch tensors and numbers, and ``out``, and
launches ``@triton.jit`` kernels: ``kernel[grid](x, out, ..., BLOCK=1024)``. When an engine is built it runs
twice, on meta tensors with different sizes of the dynamic dimensions: a number that is such a size each
time is that dimension, one that is always the same is a constant, and a grid may count blocks of rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from pelton.errors import BuildError, MissingDependencyError
from pelton.kernels.launch import (
    TRITON_TYPES,
    Argument,
    CallSpec,
    KernelSource,
    LaunchSpec,
    OperandSpec,
    Term,
)

#: Sizes that dynamic dimensions have in the two recordings: primes, so that products are told apart.
_SIZES = ((1_000_003, 1_000_033, 1_000_037, 1_000_039), (2_000_003, 2_000_029, 2_000_039, 2_000_081))
#: Rows that one program of a grid may take.
_MAX_BLOCK = 4096


@dataclass(frozen=True)
class _Raw:
    """A launch as the launcher made it."""

    kernel: Any
    grid: tuple[int, ...]
    args: Mapping[str, Any]
    options: Mapping[str, Any]


def launches_of(
    name: str, launcher: Callable[..., Any], arguments: Sequence[tuple[str, bool]]
) -> Callable[[CallSpec, int], tuple[LaunchSpec, ...]]:
    """``Tactic.launches`` of a launcher. ``arguments``: (name, is a tensor) in the schema's order."""

    def launches(call: CallSpec, max_tokens: int) -> tuple[LaunchSpec, ...]:
        return tuple(_Recording(name, launcher, arguments, call).run())

    return launches


class _Recording:
    def __init__(
        self, name: str, launcher: Callable[..., Any], arguments: Sequence[tuple[str, bool]], call: CallSpec
    ) -> None:
        self._name, self._launcher, self._arguments, self._call = name, launcher, arguments, call
        operands = [*filter(None, call.inputs), *call.outputs]
        dims = sorted({d for o in operands for d in o.shape if isinstance(d, str)})
        self._sizes = [dict(zip(dims, sizes, strict=False)) for sizes in _SIZES]

    def run(self) -> Iterator[LaunchSpec]:
        first, second = (self._record(sizes) for sizes in self._sizes)
        if [r.kernel for r in first[0]] != [r.kernel for r in second[0]]:
            self._refuse("launches other kernels for other numbers of tokens")
        if not first[0]:
            self._refuse("launches no kernel")
        for a, b in zip(first[0], second[0], strict=True):
            yield self._spec(a, first[1], b)

    def _record(self, sizes: Mapping[str, int]) -> tuple[list[_Raw], dict[int, Argument]]:
        """The launches, and which argument each tensor is, by identity."""
        known: dict[int, Argument] = {}
        alive = []

        def tensor(spec: OperandSpec, argument: Argument) -> Any:
            shape = [sizes[d] if isinstance(d, str) else d for d in spec.shape]
            made = torch.empty_strided(shape, spec.strides, dtype=getattr(torch, spec.dtype), device="meta")
            alive.append(made)
            known[id(made)] = argument
            return made

        inputs = iter(
            None if o is None else tensor(o, Argument("input", index=i))
            for i, o in enumerate(self._call.inputs)
        )
        named = {
            name: next(inputs) if is_tensor else self._call.attrs[name] for name, is_tensor in self._arguments
        }
        outputs = tuple(tensor(o, Argument("output", index=i)) for i, o in enumerate(self._call.outputs))
        with _recording() as made:
            try:
                self._launcher(**named, out=outputs[0] if len(outputs) == 1 else outputs)
            except Exception as error:
                self._refuse(f"fails on tensors without values: {type(error).__name__}: {error}", error)
        self._alive = alive  # identities must not be reused
        return made, known

    def _spec(self, a: _Raw, tensors: Mapping[int, Argument], b: _Raw) -> LaunchSpec:
        types: list[tuple[str, str]] = []
        constants: list[tuple[str, Any]] = []
        arguments: list[Argument] = []
        aligned = set()
        for name, parameter in inspect.signature(a.kernel.fn).parameters.items():
            value, other = a.args[name], b.args[name]
            if value is None or "constexpr" in str(parameter.annotation):
                if value != other:
                    self._refuse(f"makes the constant {name} depend on the number of tokens")
                constants.append((name, value))
            elif isinstance(value, torch.Tensor):
                if id(value) not in tensors:
                    self._refuse(f"passes as {name} a tensor that is no argument; pass that and offsets")
                argument = tensors[id(value)]
                operand = self._operand(argument)
                types.append((name, "*" + TRITON_TYPES[operand.dtype]))
                arguments.append(argument)
                aligned |= {name} if operand.aligned else set()
            elif isinstance(value, bool):
                self._refuse(f"passes the bool {name}; make it a tl.constexpr")
            elif isinstance(value, int):
                types.append((name, "i32"))
                arguments.append(self._integer(name, value, other))
            else:
                types.append((name, "fp32"))
                arguments.append(Argument("float", value=float(value)))
        options = {"num_warps": 4, "num_stages": 3} | dict(a.options)
        if unknown := options.keys() - {"num_warps", "num_stages"}:
            self._refuse(f"gives the option {sorted(unknown)[0]}, which engines do not keep")
        source = KernelSource(
            module=a.kernel.fn.__module__,
            function=a.kernel.fn.__name__,
            types=tuple(types),
            constants=tuple(constants),
            aligned=frozenset(aligned),
            **options,
        )
        grid = tuple((self._term(x, y),) for x, y in zip(a.grid, b.grid, strict=True))
        return LaunchSpec(source, grid, tuple(arguments))

    def _operand(self, argument: Argument) -> OperandSpec:
        if argument.kind == "output":
            return self._call.outputs[argument.index]
        return self._call.input(argument.index)

    def _integer(self, name: str, value: int, other: int) -> Argument:
        if value == other:
            return Argument("int", value=value)
        for dim, size in self._sizes[0].items():
            if (value, other) == (size, self._sizes[1][dim]):
                return Argument("dim", dim=dim)
        self._refuse(f"passes as {name} a number computed from the number of tokens")

    def _term(self, value: int, other: int) -> Term:
        if value == other:
            return Term(times=value)
        for dim, size in self._sizes[0].items():
            for block in range(1, _MAX_BLOCK + 1):
                term = Term(dim, block, value // -(-size // block))
                if (term.value(self._sizes[0]), term.value(self._sizes[1])) == (value, other):
                    return term
        self._refuse(
            f"has a grid of {value} for {self._sizes[0]}; use rows, or cdiv(rows, BLOCK), times a number"
        )

    def _refuse(self, what: str, error: Exception | None = None) -> NoReturn:
        raise BuildError(f"the Triton tactic {self._name} {what}") from error


@contextmanager
def _recording() -> Iterator[list[_Raw]]:
    """Within, ``kernel[grid](...)`` is noted instead of run."""
    try:
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction
    except ImportError as error:
        raise MissingDependencyError(
            f"Triton tactics need Triton ({error}); install it with: pip install triton"
        ) from error
    made: list[_Raw] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        parameters = inspect.signature(self.fn).parameters
        named = {p.name: p.default for p in parameters.values() if p.default is not inspect.Parameter.empty}
        named |= dict(zip(parameters, args, strict=False))
        named |= {k: v for k, v in kwargs.items() if k in parameters}
        grid = grid(named) if callable(grid) else grid
        grid = (grid,) if isinstance(grid, int) else tuple(grid)
        options = {k: v for k, v in kwargs.items() if k not in parameters}
        made.append(_Raw(self, grid, named, options))

    before = [(cls, cls.run) for cls in (JITFunction, InterpretedFunction)]
    for cls, _ in before:
        cls.run = record
    try:
        yield made
    finally:
        for cls, run in before:
            cls.run = run
