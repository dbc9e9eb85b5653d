"""What a CUDA tactic launches: kernels by source, grids and arguments over a step's dimensions.

A tactic describes its launches when the engine is built (``Tactic.launches``); the builder compiles the
kernels to cubins, and the engine keeps both. At run time a launch is numbers and addresses: no Triton.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

Dim = int | str

#: Dynamic shared memory, bytes, of programs of which three share a multiprocessor of an H100 or H200: what
#: kernels of a decode step that overlap are padded to, so that each has the place of one that ended.
FOOTPRINT = 74 << 10
#: The workspace begins with this many int32 zeros, for kernels whose programs count each other.
COUNTERS = 1 << 14
COUNTER_BYTES = 4 * COUNTERS


class Term(msgspec.Struct, frozen=True, omit_defaults=True):
    """``ceil(dim / div) * times`` of a dynamic dimension; without ``dim``: ``times``."""

    dim: str = ""
    div: int = 1
    times: int = 1

    def value(self, dims: Mapping[str, int]) -> int:
        """At the sizes ``dims`` of a step."""
        return (-(-dims[self.dim] // self.div) if self.dim else 1) * self.times


class TensorMap(msgspec.Struct, frozen=True):
    """How tensor copies (TMA, compute capability 9.0) see an operand: boxes of it, in shared memory with the
    128-byte swizzle. Sizes from the innermost dimension on."""

    dtype: str
    shape: tuple[int, ...]
    """Elements; what a box has outside of them is zeros."""
    strides: tuple[int, ...]
    """Bytes, multiples of 16, of all dimensions but the innermost."""
    box: tuple[int, ...]
    """Elements; innermost 128 bytes at most, 256 elsewhere."""


class Argument(msgspec.Struct, frozen=True, omit_defaults=True):
    """One kernel parameter: an address, a number or a tensor map.

    - ``input``, ``output``: address of the call's operand ``index``, ``offset`` bytes on;
    - ``workspace``: address ``offset`` bytes into the shared scratch;
    - ``dim``: a step's size, int32; ``int`` (int32), ``float`` (float32): ``value``;
    - ``ahead``: the weight that an instruction behind this one reads next, to be fetched into L2: its address
      (``index`` 0), bytes of 16 rows of it, how many of these there are (1 and 2, int32); zeros without one;
    - ``tensor_map``: 128 bytes that describe operand ``index`` of the side ``of``, or the scratch from byte
      ``offset`` on, as ``map``.
    """

    kind: Literal["input", "output", "workspace", "dim", "int", "float", "ahead", "tensor_map"]
    index: int = 0
    offset: int = 0
    dim: str = ""
    value: float = 0.0
    map: TensorMap | None = None
    of: Literal["input", "output", "workspace"] = "input"


@dataclass(frozen=True)
class KernelSource:
    """A Triton kernel and everything that its machine code depends on."""

    module: str
    """Imported only when the kernel is compiled."""
    function: str
    types: tuple[tuple[str, str], ...]
    """(parameter, Triton type such as ``*bf16`` or ``i32``) in the kernel's order, constants left out."""
    constants: tuple[tuple[str, int | float | bool | str | None], ...]
    aligned: frozenset[str] = frozenset()
    """Pointers known to be multiples of 16 bytes."""
    num_warps: int = 4
    num_stages: int = 2
    dependent: bool = False
    """Launched while the kernel before it still runs, where the GPU can (compute capability 9.0 and later):
    its constant DEPENDENT is then True, and every program waits before it touches what a step writes
    (``gpu/triton_dependent.py``)."""


@dataclass(frozen=True, kw_only=True)
class CudaSource:
    """A CUDA C++ kernel (``extern "C"``) and everything that its machine code depends on.

    It may include ``kernels/gpu/*.cuh`` and what lies beside it, and no header of CUDA's: those are not there
    where it is compiled.
    """

    file: str
    """Below ``pelton/kernels``."""
    function: str
    constants: tuple[tuple[str, int], ...]
    """Macros."""
    threads: int
    shared: int
    """Dynamic shared memory, bytes."""
    suffix: str = ""
    """``a`` for instructions of one architecture alone (sm_90a)."""
    dependent: bool = False
    """As ``KernelSource.dependent``: on compute capability 9.0 and later it waits itself."""


Source = KernelSource | CudaSource


@dataclass(frozen=True)
class LaunchSpec:
    """A kernel, its grid (up to three sums of terms) and its arguments, in the kernel's order."""

    kernel: Source
    grid: tuple[tuple[Term, ...], ...]
    arguments: tuple[Argument, ...]
    footprint: int = 0
    """Dynamic shared memory, bytes, that a program of a dependent kernel takes at least.

    Kernels that overlap share multiprocessors evenly only where all their programs are of one size: else a
    few multiprocessors get most of the next kernel's."""


@dataclass(frozen=True, kw_only=True)
class MatmulSpec:
    """A product left to cuBLASLt: ``out = x @ weight.T (+ residual)``, ``n`` columns, ``k`` inner.

    It has the rows of the call's input 0. ``x_row``, ``residual_row``: elements from one row to the next;
    ``dtype`` of all but the result and the residual, which are ``out_dtype``. Of float8_e4m3fn, x and weight
    have a float32 scale for each row: ``x_scales``, ``weight_scales``.
    """

    n: int
    k: int
    x_row: int
    dtype: str
    out_dtype: str
    x: Argument
    weight: Argument
    out: Argument
    residual: Argument | None = None
    residual_row: int = 0
    x_scales: Argument | None = None
    weight_scales: Argument | None = None


Work = LaunchSpec | MatmulSpec
"""What a call puts into the stream, in order."""


@dataclass(frozen=True, kw_only=True)
class OperandSpec:
    """An operand as a launch sees it."""

    dtype: str
    shape: tuple[Dim, ...]
    strides: tuple[int, ...]
    aligned: bool = True
    """Whether its address is a multiple of 16 bytes."""
    quant: str = ""
    """Block type of a packed weight, whose ``dtype`` is uint8 and whose ``shape`` is that of its values."""


@dataclass(frozen=True, kw_only=True)
class CallSpec:
    """One call of an op with its operands in memory."""

    inputs: tuple[OperandSpec | None, ...]
    outputs: tuple[OperandSpec, ...]
    attrs: Mapping[str, bool | int | float | str] = field(default_factory=dict)

    def input(self, index: int) -> OperandSpec:
        """An operand that must be there."""
        operand = self.inputs[index]
        assert operand is not None, f"input {index} is absent"
        return operand


def workspace(offset: int) -> Argument:
    """``offset`` bytes into the scratch, a multiple of 16; the reserved counters are not in the way."""
    return Argument("workspace", offset=COUNTER_BYTES + offset)


TRITON_TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int32": "i32", "uint8": "u8"}
TRITON_TYPES |= {"int8": "i8", "float8_e4m3fn": "fp8e4nv"}


class Builder:
    """Collects a kernel's parameters in order, so that types and arguments cannot drift apart."""

    def __init__(self, call: CallSpec, module: str, function: str) -> None:
        self._call, self._module, self._function = call, module, function
        self._types: list[tuple[str, str]] = []
        self._arguments: list[Argument] = []
        self._constants: list[tuple[str, int | float | bool | str | None]] = []
        self._aligned: set[str] = set()

    def input(self, name: str, index: int) -> Builder:
        """The address of input ``index``; where it is absent, the constant None."""
        operand = self._call.inputs[index]
        if operand is None:
            self._constants.append((name, None))
            return self
        return self._pointer(name, operand, Argument("input", index=index))

    def output(self, name: str, index: int = 0) -> Builder:
        return self._pointer(name, self._call.outputs[index], Argument("output", index=index))

    def workspace(self, name: str, offset: int = 0, dtype: str = "float32") -> Builder:
        self._aligned.add(name)
        self._types.append((name, "*" + TRITON_TYPES[dtype]))
        self._arguments.append(workspace(offset))
        return self

    def counters(self, name: str) -> Builder:
        """``COUNTERS`` int32 zeros, which the kernel must leave as zeros."""
        self._aligned.add(name)
        self._types.append((name, "*i32"))
        self._arguments.append(Argument("workspace"))
        return self

    def dim(self, name: str, dim: Dim) -> Builder:
        """A size: a constant where it is known, else an int32."""
        if isinstance(dim, int):
            return self.constants(**{name: dim})
        self._types.append((name, "i32"))
        self._arguments.append(Argument("dim", dim=dim))
        return self

    def number(self, name: str, value: float) -> Builder:
        """A float32 argument (not a constant: layers that differ in it share the kernel)."""
        self._types.append((name, "fp32"))
        self._arguments.append(Argument("float", value=value))
        return self

    def integer(self, name: str, value: int) -> Builder:
        """An int32 argument (not a constant: calls that differ in it share the kernel)."""
        self._types.append((name, "i32"))
        self._arguments.append(Argument("int", value=value))
        return self

    def constants(self, **values: int | float | bool | str | None) -> Builder:
        self._constants += values.items()
        return self

    def launch(
        self,
        *grid: tuple[Term, ...],
        num_warps: int = 4,
        num_stages: int = 2,
        dependent: bool = False,
        footprint: int = 0,
    ) -> LaunchSpec:
        """``dependent``: of a kernel with the constant DEPENDENT."""
        if dependent:
            self.constants(DEPENDENT=False)  # becomes True where the kernel is compiled for a GPU that can
        source = KernelSource(
            module=self._module,
            function=self._function,
            types=tuple(self._types),
            constants=tuple(self._constants),
            aligned=frozenset(self._aligned),
            num_warps=num_warps,
            num_stages=num_stages,
            dependent=dependent,
        )
        return LaunchSpec(source, grid, tuple(self._arguments), footprint)

    def _pointer(self, name: str, operand: OperandSpec, argument: Argument) -> Builder:
        if operand.aligned:
            self._aligned.add(name)
        self._types.append((name, "*" + TRITON_TYPES[operand.dtype]))
        self._arguments.append(argument)
        return self


class CudaBuilder:
    """Collects the parameters of a CUDA C++ kernel, in the order of its signature."""

    def __init__(self, call: CallSpec, file: str, function: str) -> None:
        self._call, self._file, self._function = call, file, function
        self._arguments: list[Argument] = []

    def input(self, index: int) -> CudaBuilder:
        """The address of input ``index``, a multiple of 16."""
        assert self._call.input(index).aligned
        return self._add(Argument("input", index=index))

    def output(self, index: int = 0) -> CudaBuilder:
        """The address of output ``index``, a multiple of 16."""
        assert self._call.outputs[index].aligned
        return self._add(Argument("output", index=index))

    def tensor_map(self, index: int, map: TensorMap) -> CudaBuilder:
        assert self._call.input(index).aligned
        return self._add(Argument("tensor_map", index=index, map=map))

    def nothing(self) -> CudaBuilder:
        """In the place of an address that the kernel does not use."""
        return self._add(Argument("workspace"))

    def workspace_map(self, offset: int, map: TensorMap) -> CudaBuilder:
        """``offset``: bytes behind the reserved counters, a multiple of 16."""
        return self._add(Argument("tensor_map", offset=COUNTER_BYTES + offset, map=map, of="workspace"))

    def workspace(self, offset: int = 0) -> CudaBuilder:
        """``offset``: bytes, a multiple of 16; the reserved counters are not in the way."""
        return self._add(Argument("workspace", offset=COUNTER_BYTES + offset))

    def counters(self) -> CudaBuilder:
        """``COUNTERS`` int32 zeros, which the kernel must leave as zeros."""
        return self._add(Argument("workspace"))

    def dim(self, dim: Dim) -> CudaBuilder:
        """A size, int32."""
        if isinstance(dim, int):
            return self._add(Argument("int", value=dim))
        return self._add(Argument("dim", dim=dim))

    def number(self, value: float) -> CudaBuilder:
        return self._add(Argument("float", value=value))

    def ahead(self) -> CudaBuilder:
        """Three parameters: what is known of the next weight."""
        for index in range(3):
            self._add(Argument("ahead", index=index))
        return self

    def launch(
        self,
        *grid: tuple[Term, ...],
        constants: Mapping[str, int],
        threads: int,
        shared: int,
        suffix: str = "",
        dependent: bool = False,
    ) -> LaunchSpec:
        """``dependent``: of a kernel that waits for the one before it itself."""
        source = CudaSource(
            file=self._file,
            function=self._function,
            constants=tuple(constants.items()),
            threads=threads,
            shared=shared,
            suffix=suffix,
            dependent=dependent,
        )
        return LaunchSpec(source, grid, tuple(self._arguments))

    def _add(self, argument: Argument) -> CudaBuilder:
        self._arguments.append(argument)
        return self


def on_behalf(
    works: Sequence[Work], inputs: Sequence[Argument], outputs: Sequence[Argument]
) -> tuple[Work, ...]:
    """Launches of a call that is part of another: its operands are those arguments of the whole."""

    def whole(argument: Argument) -> Argument:
        if argument.kind == "input":
            return inputs[argument.index]
        if argument.kind == "tensor_map" and argument.of != "workspace":
            operand = (inputs if argument.of == "input" else outputs)[argument.index]
            assert operand.kind in ("input", "output", "workspace"), "tensor maps are of operands"
            return msgspec.structs.replace(
                argument, index=operand.index, offset=operand.offset, of=operand.kind
            )
        return outputs[argument.index] if argument.kind == "output" else argument

    found = []
    for work in works:
        assert isinstance(work, LaunchSpec)
        found.append(replace(work, arguments=tuple(map(whole, work.arguments))))
    return tuple(found)


def result_code(call: CallSpec) -> int:
    """The constant RESULT_CODE of CUDA C++ kernels (``gpu/codes.cuh``): 0 where the result is no codes."""
    codes = call.attrs.get("y_codes")
    return 0 if codes is None else {"fp8": 1, "int8": 2}[str(codes)]


def rows(operand: OperandSpec, div: int = 1, times: int = 1) -> Term:
    """A grid term over the operand's first dimension: ``times`` programs for each ``div`` rows."""
    dim = operand.shape[0]
    return Term(dim, div, times) if isinstance(dim, str) else Term(times=-(-dim // div) * times)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()
