"""A plan on the native runner: one C call per step, no torch.

``NativePlan`` flattens a ``Plan`` into the arrays of ``csrc/pelton.h`` once; a step then only
passes dimensions and input addresses.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pelton.dtypes import ITEMSIZE, NATIVE_CODE
from pelton.engine.batch import Float32, InputBatch
from pelton.engine.external import Externals
from pelton.engine.plan import Buffer, Dim, Operand, Plan, producers
from pelton.engine.step_inputs import step_dims, step_inputs
from pelton.errors import EngineError
from pelton.kernels import native
from pelton.kernels.native import MAX_DIMS, Array

_NUMPY_DTYPE = {"bfloat16": np.dtype(np.uint16)}

# The structs of pelton.h, field by field.
_BUFFER = np.dtype([("offset", "i8"), ("data", "u8"), ("kind", "i4"), ("reserved", "i4")], align=True)
_OPERAND = np.dtype(
    [
        ("shape", "i8", MAX_DIMS),
        ("stride", "i8", MAX_DIMS),
        ("byte_offset", "i8"),
        ("dim", "i4", MAX_DIMS),
        ("buffer", "i4"),
        ("dtype", "i4"),
        ("ndim", "i4"),
        ("reserved", "i4"),
    ],
    align=True,
)
_INSTRUCTION = np.dtype(
    [
        ("first_operand", "i4"),
        ("n_in", "i4"),
        ("n_out", "i4"),
        ("first_attr", "i4"),
        ("n_attrs", "i4"),
        ("first_choice", "i4"),
        ("n_choices", "i4"),
        ("reserved", "i4"),
    ],
    align=True,
)
_CHOICE = np.dtype([("max_tokens", "i8"), ("kernel", "i4"), ("reserved", "i4")], align=True)
_CAPTURE = np.dtype([("data", "u8"), ("operand", "i4"), ("after", "i4")], align=True)


class _PlanDesc(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("buffers", "operands", "instructions", "operand_index")),
        *((name, ctypes.c_void_p) for name in ("attrs", "choices", "kernel_names", "kernel_functions")),
        *((name, ctypes.c_void_p) for name in ("arena", "workspace")),
        *((name, ctypes.c_int64) for name in ("arena_bytes", "workspace_bytes")),
        *(
            (name, ctypes.c_int32)
            for name in (
                "n_buffers",
                "n_operands",
                "n_instructions",
                "n_operand_index",
                "n_attrs",
                "n_choices",
                "n_kernels",
                "n_dims",
                "n_inputs",
                "tokens_dim",
                "threads",
                "poison",
            )
        ),
    )


@dataclass(frozen=True)
class InstructionTime:
    """What one instruction cost since profiling began."""

    name: str
    op: str
    calls: int
    seconds: float


def _pages(nbytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed page-aligned memory, in huge pages where the system gives them."""
    memory = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)[:nbytes]


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


class NativePlan:
    """A plan bound to weights and caches, ready to run steps.

    ``weights`` maps the names of ``weight`` and ``constant`` buffers to contiguous arrays (packed
    ones uint8); ``k_caches[layer]`` and ``v_caches[layer]`` are (blocks, kv_heads, block_size,
    head_dim), bfloat16 as uint16. All are borrowed and kept alive. ``poison`` fills the arena with
    NaN before each step, so that reading what was never written shows (tests). ``folder``: the engine's,
    where its compiled code is.

    Raises ``EngineError`` for a plan that this library or CPU cannot run, and
    ``MissingDependencyError`` without the library. One thread at a time may call ``run``.
    """

    def __init__(
        self,
        plan: Plan,
        weights: Mapping[str, Array],
        k_caches: Sequence[Array],
        v_caches: Sequence[Array],
        *,
        threads: int,
        poison: bool = False,
        folder: Path | None = None,
    ) -> None:
        self._lib = native.load_library()
        self.plan = plan
        self._arena = _pages(plan.arena_bytes)
        self._inputs = [b.name for b in plan.buffers if b.kind == "input"]
        # Step inputs are copied here, so that their addresses are passed to the library once.
        self._staged = [
            np.zeros([self._largest(d) for d in b.shape], np.int32) for b in plan.buffers if b.kind == "input"
        ]
        self._keep: list[object] = [weights, k_caches, v_caches]
        self._block_dims = {
            f"P{b.group}": k_caches[b.layer].shape[0] for b in plan.buffers if b.kind == "k_cache"
        }
        self._symbols = sorted({d for o in plan.operands for d in o.shape if isinstance(d, str)} | {"T"})
        self._dims = np.zeros(len(self._symbols), np.int64)
        self._input_addresses = np.array([_address(a) for a in self._staged], np.uint64)
        self._dims_address, self._inputs_address = _address(self._dims), _address(self._input_addresses)
        self._seconds: npt.NDArray[np.float64] | None = None
        self._calls = 0
        self._producer = producers(plan)
        self._operand_by_name = {o.name: i for i, o in enumerate(plan.operands) if o.buffer in self._producer}
        self._externals = Externals(plan, folder)
        self._handle = self._create(weights, k_caches, v_caches, threads, poison)
        self._logits = self._arena_view(plan.logits)

    # ---- Creation ----

    def _create(
        self,
        weights: Mapping[str, Array],
        k_caches: Sequence[Array],
        v_caches: Sequence[Array],
        threads: int,
        poison: bool,
    ) -> int:
        plan = self.plan
        workspace = _pages(plan.workspace_bytes)
        # Rows as tuples: setting a numpy row field by field would take longer than all else here.
        buffers = np.array([self._buffer_row(b, weights, k_caches, v_caches) for b in plan.buffers], _BUFFER)
        operands = np.array([self._operand_row(o) for o in plan.operands], _OPERAND)
        instructions: list[tuple[int, ...]] = []
        index: list[int] = []
        attrs: list[float] = []
        choices: list[tuple[int, int, int]] = []
        kernels: dict[tuple[str, int], int] = {}
        """(kernel of the library, function that it calls or 0) -> its number."""
        for ins in plan.instructions:
            if not ins.tactics:
                raise EngineError(
                    f"{ins.name} ({ins.op}) has no native tactic: this plan needs the reference runner"
                )
            counts = len(ins.inputs), len(ins.outputs), len(attrs), len(ins.attrs)
            instructions.append((len(index), *counts, len(choices), len(ins.tactics), 0))
            index += [*ins.inputs, *ins.outputs]
            attrs += [native.attr_value(a) for a in ins.attrs.values()]
            for c in ins.tactics:
                external = c.tactic in self._externals
                kernel = self._externals.resolve(c.tactic, ins) if external else (c.tactic, 0)
                choices.append((c.max_tokens, kernels.setdefault(kernel, len(kernels)), 0))

        instruction_rows = np.array(instructions, _INSTRUCTION)
        operand_index = np.array(index, np.int32)
        attr_values = np.array(attrs, np.float64)
        choice_rows = np.array(choices, _CHOICE)
        names = (ctypes.c_char_p * max(len(kernels), 1))(*(name.encode() for name, _ in kernels))
        functions = np.array([function for _, function in kernels], np.uint64)
        desc = _PlanDesc(
            buffers=_address(buffers),
            operands=_address(operands),
            instructions=_address(instruction_rows),
            operand_index=_address(operand_index),
            attrs=_address(attr_values),
            choices=_address(choice_rows),
            kernel_names=ctypes.addressof(names),
            kernel_functions=_address(functions),
            arena=_address(self._arena),
            workspace=_address(workspace),
            arena_bytes=plan.arena_bytes,
            workspace_bytes=plan.workspace_bytes,
            n_buffers=len(buffers),
            n_operands=len(operands),
            n_instructions=len(instructions),
            n_operand_index=len(index),
            n_attrs=len(attrs),
            n_choices=len(choices),
            n_kernels=len(kernels),
            n_dims=len(self._symbols),
            n_inputs=len(self._inputs),
            tokens_dim=self._symbols.index("T"),
            threads=threads,
            poison=int(poison),
        )
        self._keep.append(workspace)
        message = ctypes.create_string_buffer(400)
        handle = self._lib.pelton_plan_create(ctypes.byref(desc), message, len(message))
        if not handle:
            raise EngineError(f"the native runner refuses this plan: {message.value.decode()}")
        return int(handle)

    def _buffer_row(
        self, b: Buffer, weights: Mapping[str, Array], k_caches: Sequence[Array], v_caches: Sequence[Array]
    ) -> tuple[int, int, int, int]:
        """One ``pelton_buffer``: (offset, data, kind, reserved)."""
        if b.kind == "arena":
            return b.offset, 0, 0, 0
        if b.kind == "input":
            return self._inputs.index(b.name), 0, 1, 0
        if b.kind in ("k_cache", "v_cache"):
            array = (k_caches if b.kind == "k_cache" else v_caches)[b.layer]
            static = tuple(d for d in b.shape[1:])
            if array.shape[1:] != static or array.itemsize != ITEMSIZE[b.dtype]:
                raise EngineError(
                    f"{b.name}: the cache is {array.dtype}{list(array.shape)}, "
                    f"the plan wants {b.dtype}{list(b.shape)}"
                )
        else:
            if b.name not in weights:
                raise EngineError(f"the engine has no weight {b.name}, which its plan uses")
            array = weights[b.name]
            if b.nbytes and array.nbytes < b.nbytes:
                raise EngineError(f"weight {b.name} has {array.nbytes} bytes, its plan wants {b.nbytes}")
        if not array.flags.c_contiguous:
            raise EngineError(f"{b.name} must be contiguous")
        self._keep.append(array)
        return 0, _address(array), 2, 0

    def _operand_row(self, o: Operand) -> tuple[object, ...]:
        """One ``pelton_operand``, field by field."""
        buffer, n = self.plan.buffers[o.buffer], len(o.shape)
        assert n <= MAX_DIMS, f"{o.name} has {n} dimensions"
        fill = (0,) * (MAX_DIMS - n)
        return (
            (*(0 if isinstance(d, str) else d for d in o.shape), *fill),
            (*o.strides, *(0,) * (MAX_DIMS - len(o.strides))),
            o.offset * ITEMSIZE[buffer.dtype],
            (*(self._symbols.index(d) if isinstance(d, str) else -1 for d in o.shape), *(-1 for _ in fill)),
            o.buffer,
            NATIVE_CODE[buffer.dtype],
            n,
            0,
        )

    def _arena_view(self, operand: int) -> Float32:
        """The operand at its largest, as a view of the arena."""
        o = self.plan.operands[operand]
        b = self.plan.buffers[o.buffer]
        assert b.kind == "arena" and b.dtype == "float32", f"logits must be float32 in the arena: {b}"
        shape = tuple(self._largest(d) for d in o.shape)
        view = np.ndarray(
            shape, np.float32, self._arena, b.offset + 4 * o.offset, tuple(4 * s for s in o.strides)
        )
        view.flags.writeable = False
        return view

    def _largest(self, dim: Dim) -> int:
        """The greatest value of a dimension."""
        if isinstance(dim, int):
            return dim
        return self.plan.dims["B"] + 1 if dim == "B+1" else self.plan.dims[dim]

    # ---- A step ----

    def run(self, batch: InputBatch, outputs: Sequence[str] = ()) -> tuple[Float32, dict[str, Array]]:
        """Compute one step: logits (N, V), a view valid until the next run, and copies of the named
        operands.

        ``batch`` must keep the step contract (``engine.validate`` checks it): kernels trust slots,
        blocks and ids. Raises ``ValueError`` for a step larger than the plan, ``KeyError`` for an
        unknown output name; nothing is then written.
        """
        assert self._handle, "the plan is closed"
        values = step_dims(batch)
        for dim, count in values.items():
            if dim in self.plan.dims and count > self.plan.dims[dim]:
                raise ValueError(
                    f"the step has {dim} = {count}, the engine was built for {self.plan.dims[dim]}"
                )
        values.update(self._block_dims)
        arrays = step_inputs(batch)
        for name, staged in zip(self._inputs, self._staged, strict=True):
            array = arrays[name]
            np.copyto(staged[: len(array)], array, casting="no")
        self._dims[:] = [values[s] for s in self._symbols]
        results, captures = self._captures(outputs, values)
        code = self._lib.pelton_plan_run(
            self._handle,
            self._dims_address,
            self._inputs_address,
            _address(captures) if outputs else None,
            len(captures),
            None if self._seconds is None else _address(self._seconds),
        )
        if code:
            self._externals.raise_error()
            raise ValueError(f"the plan cannot run this step: {native.ERRORS[code]}")
        self._calls += self._seconds is not None
        return self._logits[: values["N"]], results

    def _captures(
        self, outputs: Sequence[str], values: dict[str, int]
    ) -> tuple[dict[str, Array], npt.NDArray[np.void]]:
        results: dict[str, Array] = {}
        rows: list[tuple[int, int, int]] = []
        for name in outputs:
            if name not in self._operand_by_name:
                raise KeyError(f"the plan has no tensor called {name}")
            o = self._operand_by_name[name]
            operand = self.plan.operands[o]
            dtype = self.plan.buffers[operand.buffer].dtype
            shape = tuple(values[d] if isinstance(d, str) else d for d in operand.shape)
            results[name] = np.empty(shape, _NUMPY_DTYPE.get(dtype, np.dtype(dtype)))
            rows.append((_address(results[name]), o, self._producer[operand.buffer]))
        rows.sort(key=lambda row: row[2])
        return results, np.array(rows, _CAPTURE)

    # ---- Profiling ----

    def start_profile(self) -> None:
        """Time every instruction from now on (a barrier and a clock read each: a few per cent)."""
        self._seconds = np.zeros(len(self.plan.instructions), np.float64)
        self._calls = 0

    def stop_profile(self) -> None:
        """Run without clocks again."""
        self._seconds = None

    def profile(self) -> list[InstructionTime]:
        """Times by instruction since ``start_profile``."""
        assert self._seconds is not None, "start_profile first"
        return [
            InstructionTime(ins.name, ins.op, self._calls, float(s))
            for ins, s in zip(self.plan.instructions, self._seconds, strict=True)
        ]

    def close(self) -> None:
        """End the threads; idempotent. Logits already returned stay readable."""
        if self._handle:
            self._lib.pelton_plan_destroy(self._handle)
            self._handle = 0
