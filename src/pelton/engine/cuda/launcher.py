"""A plan's launches bound to addresses: what a step puts into the stream.

The sizes of a step are shared C integers that every launch points to, so that a step of other sizes changes
a handful of numbers and the grids, not the arguments of hundreds of launches.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from pelton.engine.cuda.ahead import next_weights
from pelton.engine.cuda.code import Code, Launch, Matmul, Variants, Work
from pelton.engine.cuda.same_rows import same_rows
from pelton.engine.plan import Instruction, Operand, Plan, TacticChoice, row_dim
from pelton.errors import EngineError
from pelton.kernels.gpu.cublaslt import CublasLt, Product
from pelton.kernels.gpu.driver import (
    Function,
    LaunchConfig,
    Stream,
    dependent_launch,
    launch,
)
from pelton.kernels.gpu.tensor_maps import tensor_map
from pelton.kernels.launch import Argument, Term


class _Grid:
    """Programs along three axes; layers share theirs."""

    def __init__(self, axes: tuple[tuple[Term, ...], ...]) -> None:
        self._axes = axes
        self._sizes: _Sizes | None = None
        self._counts: tuple[int, ...] = ()

    def of(self, sizes: _Sizes) -> tuple[int, ...]:
        """For a step of these sizes; the same object until the counts change."""
        if self._sizes is not sizes:
            self._sizes = sizes
            counts = [sum(term.value(sizes.dims) for term in axis) for axis in self._axes]
            found = (*counts, *[1] * (3 - len(counts)))
            if found != self._counts:
                self._counts = found
        return self._counts


class _Sizes:
    """A step's sizes."""

    def __init__(self, dims: Mapping[str, int]) -> None:
        self.dims = dims


class _Bound:
    """One launch with its arguments in place."""

    def __init__(
        self,
        function: Function,
        threads: int,
        shared: int,
        work: Launch,
        grid: _Grid,
        pointers: list[int],
    ) -> None:
        self._grid = grid
        self._counts: tuple[int, ...] = ()
        self._stream: Stream | None = None
        self.function = function
        self.parameters = (C.c_void_p * len(pointers))(*pointers)
        self.config = LaunchConfig()
        self.config.block[:] = (threads, 1, 1)
        self.config.shared = max(shared, work.footprint)
        if work.dependent:
            self._attribute = dependent_launch()
            self.config.attributes = C.pointer(self._attribute)
            self.config.n_attributes = 1

    def run(self, stream: Stream, sizes: _Sizes) -> None:
        grid = self._grid.of(sizes)
        if 0 in grid:  # a step may want no logits at all
            return
        if self._counts is not grid or self._stream is not stream:
            self._counts, self._stream = grid, stream
            self.config.grid[:] = grid
            self.config.stream = stream.handle
        launch(self.config, self.function.handle, self.parameters)


#: What a product is besides its addresses.
_MATMUL = ("n", "k", "x_row", "dtype", "out_dtype", "residual_row")
MATMUL_ADDRESSES = ("x", "weight", "out", "residual", "x_scales", "weight_scales")


class _Product:
    """One product by cuBLASLt with its addresses."""

    def __init__(self, cublas: CublasLt, work: Matmul, rows: str, addresses: Mapping[str, int]) -> None:
        self._rows = rows
        arguments: dict[str, Any] = {name: getattr(work, name) for name in _MATMUL} | dict(addresses)
        self._product = Product(cublas, **arguments)

    def run(self, stream: Stream, sizes: _Sizes) -> None:
        if tokens := sizes.dims[self._rows]:
            self._product.run(stream, tokens)


class _Work(Protocol):
    """What an instruction puts into the stream."""

    def run(self, stream: Stream, sizes: _Sizes) -> None: ...


class Launcher:
    """Launches the instructions of ``plan`` with the kernels of ``code``.

    ``address_of(operand, instruction)`` gives device addresses; ``workspace`` is the scratch's.
    """

    def __init__(
        self,
        plan: Plan,
        code: Code,
        root: Path,
        address_of: Callable[[Operand], int],
        workspace: int,
    ) -> None:
        self._plan = plan
        self._code = code
        self._dims: dict[str, C.c_int32] = {}
        self._keep: list[object] = []
        self._grids: dict[tuple[tuple[Term, ...], ...], _Grid] = {}
        self._address_of = address_of
        self._workspace = workspace
        works = [
            w for by_tactic in code.launches for v in by_tactic.values() for w in (*v.any, *(v.decode or ()))
        ]
        shared = [k.shared for k in code.kernels]
        for work in works:
            if isinstance(work, Launch):
                shared[work.kernel] = max(shared[work.kernel], work.footprint)
        self._functions = [
            Function((root / k.file).read_bytes(), k.name, size)
            for k, size in zip(code.kernels, shared, strict=True)
        ]
        self._parameter_sizes = [f.parameter_sizes() for f in self._functions]
        self._cublas = CublasLt() if any(isinstance(w, Matmul) for w in works) else None
        self._bound: list[list[tuple[int, tuple[list[_Work], ...]]]] = []
        """Of each instruction: largest rows; works of any step, of decode steps, of those of all rows."""
        self._same = same_rows(plan)
        weights = next_weights(plan, address_of)
        self._ahead = {i.name: w for i, w in zip(plan.instructions, weights, strict=True)}
        for instruction, by_tactic in zip(plan.instructions, code.launches, strict=True):
            self._bound.append(
                [self._choice(instruction, c, by_tactic[c.tactic]) for c in instruction.tactics]
            )
        self._rows = [row_dim(plan, i) for i in plan.instructions]

    def _choice(
        self, instruction: Instruction, choice: TacticChoice, variants: Variants
    ) -> tuple[int, tuple[list[_Work], ...]]:
        always = [self._work(instruction, work) for work in variants.any]
        decode = always
        if variants.decode is not None:
            decode = [self._work(instruction, work) for work in variants.decode]
        whole = decode
        if self._same.keys() & set(instruction.outputs):
            whole = []
        elif self._same.keys() & set(instruction.inputs):
            inputs = tuple(self._same.get(i, i) for i in instruction.inputs)
            instruction = msgspec.structs.replace(instruction, inputs=inputs)
            works = variants.any if variants.decode is None else variants.decode
            whole = [self._work(instruction, work) for work in works]
        return choice.max_tokens, (always, decode, whole)

    def _work(self, instruction: Instruction, work: Work) -> _Work:
        if isinstance(work, Launch):
            return self._bind(instruction, work)
        assert self._cublas is not None
        arguments = {name: getattr(work, name) for name in MATMUL_ADDRESSES}
        addresses = {n: self._pointer(instruction, a) for n, a in arguments.items() if a is not None}
        rows = self._plan.operands[instruction.inputs[0]].shape[0]
        return _Product(self._cublas, work, str(rows), addresses)

    def _pointer(self, instruction: Instruction, argument: Argument) -> int:
        match argument.kind:
            case "input":
                operand = self._plan.operands[instruction.inputs[argument.index]]
                return self._address_of(operand) + argument.offset
            case "output":
                operand = self._plan.operands[instruction.outputs[argument.index]]
                return self._address_of(operand) + argument.offset
            case "workspace":
                return self._workspace + argument.offset
        raise AssertionError(f"{argument.kind} is no address")

    def _bind(self, instruction: Instruction, work: Launch) -> _Bound:
        kernel = self._code.kernels[work.kernel]
        pointers, sizes = [], []
        for argument in work.arguments:
            value: Any
            match argument.kind:
                case "dim":
                    value = self._dims.setdefault(argument.dim, C.c_int32())
                case "int":
                    value = C.c_int32(int(argument.value))
                case "float":
                    value = C.c_float(argument.value)
                case "ahead":
                    value = self._ahead[instruction.name].parameters()[argument.index]
                case "tensor_map":
                    assert argument.map is not None
                    operand = msgspec.structs.replace(argument, kind=argument.of)
                    value = tensor_map(self._pointer(instruction, operand), argument.map)
                case _:
                    value = C.c_uint64(self._pointer(instruction, argument))
            self._keep.append(value)
            pointers.append(C.addressof(value))
            sizes.append(C.sizeof(value))
        for _ in range(kernel.scratch):
            null = C.c_uint64(0)
            self._keep.append(null)
            pointers.append(C.addressof(null))
            sizes.append(C.sizeof(null))
        wanted = self._parameter_sizes[work.kernel]
        if wanted is not None and sizes != wanted:  # the driver would read beyond what it was given
            raise EngineError(
                f"{instruction.name} gives the kernel {kernel.name} arguments of {sizes} bytes, and it takes "
                f"{wanted}; rebuild the engine"
            )
        grid = self._grids.setdefault(work.grid, _Grid(work.grid))
        return _Bound(self._functions[work.kernel], kernel.threads, kernel.shared, work, grid, pointers)

    def run(
        self,
        stream: Stream,
        dims: Mapping[str, int],
        after: Callable[[int], None] | None = None,
        *,
        decodes: bool,
        which: slice = slice(None),
    ) -> None:
        """Put a step of the sizes ``dims`` into ``stream``; ``after`` is called behind each instruction.

        ``decodes``: every sequence has one token (``step_inputs.decodes``); ``which`` of the instructions.
        """
        for name, value in self._dims.items():
            value.value = dims[name]
        sizes = _Sizes(dims)
        variant = 0
        if decodes:  # whoever looks at operands finds all of them
            variant = 2 if dims["N"] == dims["T"] and after is None else 1
        for index in range(*which.indices(len(self._bound))):
            choices = self._bound[index]
            rows = dims[self._rows[index]]
            works = None
            for largest, variants in choices:
                if rows <= largest:
                    works = variants[variant]
                    break
            if works is None:
                name = self._plan.instructions[index].name
                raise EngineError(f"the plan has no kernel for {rows} rows of {name}")
            for work in works:
                work.run(stream, sizes)
            if after is not None:
                after(index)

    def close(self) -> None:
        for function in self._functions:
            function.close()
        if self._cublas is not None:
            self._cublas.close()
