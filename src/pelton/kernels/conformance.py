"""Holds tactics to their op's reference, on the op's own samples.

A native kernel is run through the library's one-kernel entry at a chosen ISA level. Outputs are
pre-filled with NaN and surrounded by sentinel bytes, the workspace is NaN, inputs must come back
unchanged, and caches that an op mutates are compared as a whole. Errors are normalised,
``||out - ref|| / ||ref||``, with a guard on the largest one.

Needs torch (the references); the builder uses it too, to drop a tactic that computes wrongly.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pelton.dtypes import is_dense
from pelton.ir.block_encoder import quantize
from pelton.ir.op import Op, Sample
from pelton.ir.ops import quantize_q8
from pelton.ir.tensors import HostTensor
from pelton.kernels import native
from pelton.kernels.compile_c import build_folder, compile_c
from pelton.kernels.host import HostKernel
from pelton.kernels.layouts import LAYOUTS
from pelton.kernels.native import Array, Attr, NativeTensor
from pelton.kernels.tactic import NodeSpec, Tactic, TensorSpec, all_tactics

SENTINEL = 0xA5
MARGIN = 256
#: The largest single error may be this many times the tolerance, in units of the largest value.
MAX_ERROR_FACTOR = 8.0


class ConformanceError(AssertionError):
    """A tactic departs from its op's reference."""


@dataclass(frozen=True)
class Case:
    """One sample for one tactic at one ISA level."""

    op: Op
    sample: Sample
    tactic: Tactic
    level: str

    def __str__(self) -> str:
        return f"{self.tactic.name}/{self.level}: {self.sample.name}"


def split_arguments(op: Op, args: Sequence[Any]) -> tuple[list[Any], dict[str, Attr]]:
    """(tensors or None, other arguments by name), both in schema order with defaults filled in."""
    tensors, attrs = [], {}
    for i, argument in enumerate(op.torch_op._schema.arguments):
        value = args[i] if i < len(args) else argument.default_value
        if "Tensor" in str(argument.type):
            tensors.append(value)
        else:
            attrs[argument.name] = value
    return tensors, attrs


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def node_spec(op: Op, sample: Sample, activations: str = "float32") -> NodeSpec:
    """The sample as the tactic chooser would see its node."""
    tensors, attrs = split_arguments(op, sample.args)
    specs = tuple(
        None
        if t is None
        else TensorSpec(dtype=_dtype(t), shape=tuple(t.shape), quant=sample.quant.get(i, ""))
        for i, t in enumerate(tensors)
    )
    return NodeSpec(op=op.name, inputs=specs, attrs=attrs, activations=activations)


def cases(op: Op, seed: int = 0) -> Iterator[Case]:
    """Every sample of ``op`` for every tactic that supports it, native ones at every level of this CPU."""
    tactics = [t for t in all_tactics().values() if t.op == op.name and t.device == "cpu"]
    for sample in op.samples(torch.Generator().manual_seed(seed)):
        spec = node_spec(op, sample)
        for tactic in tactics:
            if tactic.supports(replace(spec, activations=tactic.precision)):
                for level in levels_of(tactic):
                    yield Case(op, sample, tactic, level)


def levels_of(tactic: Tactic) -> tuple[str, ...]:
    """CPU levels at which the tactic can run here, lowest first; one that is not native runs at one."""
    return native.kernel_levels()[tactic.name] if tactic.kind == "native" else (native.cpu_level(),)


# ---- Operands ----


def to_numpy(tensor: torch.Tensor) -> Array | NativeTensor:
    """A view with the tensor's strides."""
    if tensor.dtype == torch.bfloat16:
        return NativeTensor(tensor.view(torch.int16).numpy().view(np.uint16), "bfloat16")
    if tensor.dtype == torch.float8_e4m3fn:
        return NativeTensor(tensor.view(torch.uint8).numpy(), "float8_e4m3fn")
    array: Array = tensor.numpy()
    return array


def host_tensor(values: torch.Tensor, quant: str) -> HostTensor:
    """``values`` rounded to ``quant``."""
    array = values.contiguous().float().numpy()
    if not is_dense(quant):
        return quantize(array, quant)
    if quant == "bfloat16":
        return HostTensor(
            quant, tuple(values.shape), values.bfloat16().view(torch.int16).numpy().view(np.uint16)
        )
    return HostTensor(quant, tuple(values.shape), array.astype(quant))


def pack_weight(values: torch.Tensor, quant: str, layout: str) -> tuple[NativeTensor, torch.Tensor]:
    """(the packed weight, the values it stands for)."""
    host = host_tensor(values, quant)
    packed = native.aligned_empty(LAYOUTS[layout].nbytes(quant, host.shape))
    packed[:] = LAYOUTS[layout].pack(host)
    exact = torch.from_numpy(LAYOUTS[layout].unpack(packed, quant, host.shape).copy())
    return NativeTensor(packed, "uint8", host.shape), exact


class _Guarded:
    """Memory for one tensor between sentinel bytes."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], fill: Array | None = None) -> None:
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self._bytes = native.aligned_empty(nbytes + 2 * MARGIN)
        self._bytes[:] = SENTINEL
        self._bytes[MARGIN : MARGIN + nbytes] = 0xFF  # NaN in every float type
        self.array: Array = self._bytes[MARGIN : MARGIN + nbytes].view(dtype).reshape(shape)
        if fill is not None:
            self.array[...] = fill
        self._inner = nbytes

    def check(self, what: str) -> None:
        if (self._bytes[:MARGIN] != SENTINEL).any() or (
            self._bytes[MARGIN + self._inner :] != SENTINEL
        ).any():
            raise ConformanceError(f"{what}: wrote outside its memory")


# ---- Running ----


def run_native(
    op: Op, tactic: Tactic, sample: Sample, team: native.Team, level: str | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Run the tactic: (its outputs, mutated arguments after it, the tensors the reference should
    see). Raises ``ConformanceError`` for a write outside its outputs."""
    tensors, attrs = split_arguments(op, sample.args)
    tensor_of_arg = {i: n for n, i in enumerate(_tensor_positions(op))}
    mutated = [tensor_of_arg[i] for i in op.mutates]
    exact = list(tensors)
    inputs: list[Array | NativeTensor | None] = []
    guards: dict[int, _Guarded] = {}
    for i, t in enumerate(tensors):
        if t is None:
            inputs.append(None)
        elif i in sample.quant:
            packed, exact[i] = pack_weight(t, sample.quant[i], tactic.weight_layouts.get(i, "rows"))
            inputs.append(packed)
        elif i in mutated:
            source = to_numpy(t)
            data = source.data if isinstance(source, NativeTensor) else source
            guards[i] = _Guarded(data.shape, data.dtype, data)
            inputs.append(NativeTensor(guards[i].array, _dtype(t)))
        else:
            inputs.append(to_numpy(t))

    shapes = op.shape_rule(*_arguments(op, exact, attrs))
    shapes = () if shapes is None else shapes if isinstance(shapes, tuple) else (shapes,)
    outputs = [_Guarded(tuple(s.shape), np.dtype(_dtype(s))) for s in shapes]
    before = [None if x is None else _bytes(x) for x in inputs]
    tokens = next(t.shape[0] for t in tensors if t is not None)
    node = node_spec(op, sample, tactic.precision)
    arrays, workspace = [o.array for o in outputs], tactic.workspace(node, tokens)
    if tactic.kind == "native":
        values = list(attrs.values())
        team.run(tactic.name, inputs, arrays, values, workspace_bytes=workspace, level=level)
    else:
        names = [op.torch_op._schema.arguments[i].name for i in _tensor_positions(op)]
        with external_function(tactic, names, attrs, level or native.cpu_level()) as (kernel, function):
            values = list(attrs.values())
            team.run(kernel, inputs, arrays, values, workspace_bytes=workspace, function=function)
    for i, (x, old) in enumerate(zip(inputs, before, strict=True)):
        if x is not None and i not in mutated and _bytes(x) != old:
            raise ConformanceError(f"{tactic.name}: changed its input {i}")
    for n, o in enumerate(outputs):
        o.check(f"{tactic.name}: output {n}")
    for i, g in guards.items():
        g.check(f"{tactic.name}: argument {i}")
    after = [_from_numpy(guards[i].array, _dtype(tensors[i])) for i in mutated]
    return [torch.from_numpy(np.array(o.array)) for o in outputs], after, exact


@contextmanager
def external_function(
    tactic: Tactic, tensors: Sequence[str], attrs: dict[str, Attr], level: str
) -> Iterator[tuple[str, int]]:
    """(kernel, function that it calls) of a tactic from outside, C source compiled for ``level``; raises
    ``ConformanceError`` where the function does."""
    if tactic.kind == "library":
        path = compile_c(tactic.source, build_folder(), cpu_level=level, label=tactic.name)
        symbol = getattr(ctypes.CDLL(str(path)), tactic.function)
        yield "external.library", int(ctypes.cast(symbol, ctypes.c_void_p).value or 0)
        return
    assert tactic.kind == "python"
    assert tactic.implementation is not None
    host = HostKernel(tactic.implementation, tensors, attrs)
    try:
        yield HostKernel.kernel, host.address
    except ValueError:
        if host.error is None:
            raise
        if not isinstance(host.error, Exception):
            raise host.error from None
        raise ConformanceError(
            f"{tactic.name} raised {type(host.error).__name__}: {host.error}"
        ) from host.error


def _tensor_positions(op: Op) -> list[int]:
    return [i for i, a in enumerate(op.torch_op._schema.arguments) if "Tensor" in str(a.type)]


def _arguments(op: Op, tensors: Sequence[Any], attrs: dict[str, Attr]) -> list[Any]:
    """Back to positional arguments."""
    rest = iter(tensors)
    return [next(rest) if "Tensor" in str(a.type) else attrs[a.name] for a in op.torch_op._schema.arguments]


def _bytes(x: Array | NativeTensor) -> bytes:
    return (x.data if isinstance(x, NativeTensor) else x).tobytes()


def _from_numpy(array: Array, dtype: str) -> torch.Tensor:
    if dtype == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    if dtype == "float8_e4m3fn":
        return torch.from_numpy(array.copy()).view(torch.float8_e4m3fn)
    return torch.from_numpy(np.array(array))


# ---- Comparing ----


def normalised_error(got: npt.NDArray[np.float64], want: npt.NDArray[np.float64]) -> float:
    """``||got - want|| / ||want||`` (of ``got`` itself where ``want`` is zero)."""
    norm = float(np.linalg.norm(want))
    return float(np.linalg.norm(got - want)) / (norm or 1.0)


def compare(got: torch.Tensor, want: torch.Tensor, tolerance: float, what: str) -> float:
    """The normalised error; raises ``ConformanceError`` beyond ``tolerance``, or where shapes, NaN
    or infinities differ."""
    if got.shape != want.shape:
        raise ConformanceError(f"{what}: shape {tuple(got.shape)}, reference {tuple(want.shape)}")
    a, b = (t.detach().double().numpy().ravel() for t in (got, want))
    special = ~np.isfinite(b)
    if not np.array_equal(a[special], b[special], equal_nan=True) or not np.isfinite(a[~special]).all():
        bad = int(np.argmax(~((a == b) | (np.isnan(a) & np.isnan(b)) | (np.isfinite(a) & np.isfinite(b)))))
        raise ConformanceError(f"{what}: element {bad} is {a[bad]}, reference {b[bad]}")
    a, b = a[~special], b[~special]
    error = normalised_error(a, b)
    worst, top = (float(np.abs(x).max(initial=0.0)) for x in (a - b, b))
    if error > tolerance or worst > MAX_ERROR_FACTOR * tolerance * (top or 1.0):
        raise ConformanceError(
            f"{what}: normalised error {error:.3g}, largest {worst:.3g} of {top:.3g}; allowed {tolerance:.3g}"
        )
    return error


def quantised_values(got: torch.Tensor, what: str) -> torch.Tensor:
    """The values of quantised rows (the only uint8 results there are).

    Raises ``ConformanceError`` where their sums are not those of their values.
    """
    q, d = quantize_q8.unpack(got)
    if not torch.equal(quantize_q8.pack(q, d), got):
        raise ConformanceError(f"{what}: a block's sums are not those of its values")
    return (q * d).flatten(1)


def tolerance_of(op: Op, tactic: Tactic, result: torch.Tensor) -> float:
    """By the tactic's precision if it is a reduced one, else by the result's own type."""
    if tactic.precision != "float32":
        return op.tolerance[tactic.precision]
    return op.tolerance.get(_dtype(result), op.tolerance["float32"])


def check(case: Case, team: native.Team) -> float:
    """Run one case; the largest normalised error, or ``ConformanceError``."""
    op, tactic = case.op, case.tactic
    outputs, mutated, exact = run_native(op, tactic, case.sample, team, case.level)
    _, attrs = split_arguments(op, case.sample.args)
    positions = _tensor_positions(op)
    args = _arguments(op, exact, attrs)
    for i in op.mutates:
        args[i] = args[i].clone()
    expected = op.reference(*args)
    expected = () if expected is None else expected if isinstance(expected, tuple) else (expected,)
    names = [f"{case} output {n}" for n in range(len(outputs))]
    names += [f"{case} argument {positions.index(i)}" for i in op.mutates]
    pairs = zip([*outputs, *mutated], [*expected, *(args[i] for i in op.mutates)], names, strict=True)
    worst = 0.0
    for got, want, name in pairs:
        tolerance = tolerance_of(op, tactic, want)
        if want.dtype == torch.uint8:
            got, want = quantised_values(got, name), quantize_q8.dequantize(want)
        worst = max(worst, compare(got, want, tolerance, name))
    return worst
