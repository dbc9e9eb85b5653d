"""A plan on the native runner: one C call per step, no torch.

``NativePlan`` flattens a ``Plan`` into the arrays of ``csrc/pelton.h`` once; a step then only
passes dimensions and input addresses.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pelton.dtypes import ITEMSIZE, NATIVE_CODE
from pelton.engine.batch import Float32, InputBatch
from pelton.engine.plan import Buffer, Plan
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
        *((name, ctypes.c_void_p) for name in ("attrs", "choices", "kernel_names", "arena", "workspace")),
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
    NaN before each step, so that reading what was never written shows (tests).

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
    ) -> None:
        self._lib = native.load_library()
        self.plan = plan
        self._arena = _pages(plan.arena_bytes)
        self._inputs = [b.name for b in plan.buffers if b.kind == "input"]
        self._input_columns = {
            b.name: int(b.shape[1]) for b in plan.buffers if b.kind == "input" and len(b.shape) > 1
        }
        self._keep: list[object] = [weights, k_caches, v_caches]
        self._blocks = {
            b.group: k_caches[b.layer].shape[0] for b in plan.buffers if b.kind == "k_cache"
        }  # by KV group
        self._block_size = {b.group: k_caches[b.layer].shape[2] for b in plan.buffers if b.kind == "k_cache"}
        self._symbols = sorted({d for o in plan.operands for d in o.shape if isinstance(d, str)} | {"T"})
        self._dims = np.zeros(len(self._symbols), np.int64)
        self._input_addresses = np.zeros(max(len(self._inputs), 1), np.uint64)
        self._seconds: npt.NDArray[np.float64] | None = None
        self._calls = 0
        self._producer = {o: i for i, ins in enumerate(plan.instructions) for o in reversed(ins.outputs)}
        self._operand_by_name = {plan.operands[o].name: o for o in self._producer}
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
        buffers = np.zeros(len(plan.buffers), _BUFFER)
        for i, buffer in enumerate(plan.buffers):
            buffers[i] = self._buffer_row(buffer, weights, k_caches, v_caches)

        operands = np.zeros(len(plan.operands), _OPERAND)
        for row, operand in zip(operands, plan.operands, strict=True):
            dtype, n = plan.buffers[operand.buffer].dtype, len(operand.shape)
            assert n <= MAX_DIMS, f"{operand.name} has {n} dimensions"
            packed = plan.buffers[operand.buffer].kind == "weight"
            dense = packed or not n or operand.strides[-1] == 1 or operand.shape[-1] == 1
            assert dense, f"{operand.name}: kernels need a last axis of stride 1, it is {operand.strides}"
            row["shape"][:n] = [0 if isinstance(d, str) else d for d in operand.shape]
            row["dim"] = -1
            row["dim"][:n] = [self._symbols.index(d) if isinstance(d, str) else -1 for d in operand.shape]
            row["stride"][: len(operand.strides)] = operand.strides
            row["byte_offset"] = operand.offset * ITEMSIZE[dtype]
            row["buffer"], row["dtype"], row["ndim"] = operand.buffer, NATIVE_CODE[dtype], n

        instructions = np.zeros(len(plan.instructions), _INSTRUCTION)
        index: list[int] = []
        attrs: list[float] = []
        choices: list[tuple[int, int, int]] = []
        kernels: dict[str, int] = {}
        for row, ins in zip(instructions, plan.instructions, strict=True):
            if not ins.tactics:
                raise EngineError(
                    f"{ins.name} ({ins.op}) has no native tactic: this plan needs the reference runner"
                )
            row["first_operand"], row["n_in"], row["n_out"] = len(index), len(ins.inputs), len(ins.outputs)
            row["first_attr"], row["n_attrs"] = len(attrs), len(ins.attrs)
            row["first_choice"], row["n_choices"] = len(choices), len(ins.tactics)
            index += [*ins.inputs, *ins.outputs]
            attrs += [native.attr_value(a) for a in ins.attrs.values()]
            choices += [(c.max_tokens, kernels.setdefault(c.tactic, len(kernels)), 0) for c in ins.tactics]

        operand_index = np.array(index, np.int32)
        attr_values = np.array(attrs, np.float64)
        choice_rows = np.array(choices, _CHOICE)
        names = (ctypes.c_char_p * max(len(kernels), 1))(*(k.encode() for k in kernels))
        desc = _PlanDesc(
            buffers=_address(buffers),
            operands=_address(operands),
            instructions=_address(instructions),
            operand_index=_address(operand_index),
            attrs=_address(attr_values),
            choices=_address(choice_rows),
            kernel_names=ctypes.addressof(names),
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

    def _arena_view(self, operand: int) -> Float32:
        """The operand at its largest, as a view of the arena."""
        o = self.plan.operands[operand]
        b = self.plan.buffers[o.buffer]
        assert b.kind == "arena" and b.dtype == "float32", f"logits must be float32 in the arena: {b}"
        shape = tuple(self.plan.dims[d] if isinstance(d, str) else d for d in o.shape)
        view = np.ndarray(
            shape, np.float32, self._arena, b.offset + 4 * o.offset, tuple(4 * s for s in o.strides)
        )
        view.flags.writeable = False
        return view

    # ---- A step ----

    def run(self, batch: InputBatch, outputs: Sequence[str] = ()) -> tuple[Float32, dict[str, Array]]:
        """Compute one step: logits (N, V), a view valid until the next run, and copies of the named
        operands. Raises ``ValueError`` when the batch breaks the step contract (nothing is then
        written), ``KeyError`` for an unknown output name."""
        assert self._handle, "the plan is closed"
        values = self._dim_values(batch)
        arrays = [self._input(batch, name) for name in self._inputs]
        self._check(batch, values)
        self._dims[:] = [values[s] for s in self._symbols]
        self._input_addresses[: len(arrays)] = [_address(a) for a in arrays]
        results, captures = self._captures(outputs, values)
        code = self._lib.pelton_plan_run(
            self._handle,
            _address(self._dims),
            _address(self._input_addresses),
            _address(captures),
            len(captures),
            None if self._seconds is None else _address(self._seconds),
        )
        if code:
            raise ValueError(f"the plan cannot run this step: {native.ERRORS[code]}")
        self._calls += self._seconds is not None
        return self._logits[: values["N"]], results

    def _dim_values(self, batch: InputBatch) -> dict[str, int]:
        values = {
            "T": len(batch.input_ids_T),
            "B": len(batch.groups[0].seq_lens_B),
            "N": len(batch.logits_indices_N),
        }
        for name, count in values.items():
            if count > self.plan.dims.get(name, count):
                raise ValueError(
                    f"the step has {name} = {count}, the engine was built for {self.plan.dims[name]}"
                )
        values["B+1"] = values["B"] + 1
        values.update((f"P{g}", n) for g, n in self._blocks.items())
        return values

    def _input(self, batch: InputBatch, name: str) -> Array:
        base, _, group = name.partition(".")
        array: Array
        match base:
            case "input_ids":
                array = batch.input_ids_T
            case "positions":
                array = batch.positions_T
            case "logits_indices":
                array = batch.logits_indices_N
            case "slot_mapping":
                array = batch.groups[int(group)].slot_mapping_T
            case "block_table":
                array = batch.groups[int(group)].block_table_BM
            case "cu_seqlens":
                array = batch.groups[int(group or 0)].cu_seqlens
            case "seq_lens":
                array = batch.groups[int(group or 0)].seq_lens_B
            case _:
                raise EngineError(f"the plan wants a step input called {name}, which no step has")
        if array.dtype != np.int32 or not array.flags.c_contiguous:
            raise ValueError(f"step input {name} must be contiguous int32")
        return array

    def _check(self, batch: InputBatch, values: dict[str, int]) -> None:
        """What would make a kernel read or write outside its memory."""
        tokens, seqs = values["T"], values["B"]
        if tokens == 0:
            raise ValueError("the step has no tokens")
        if len(batch.positions_T) != tokens:
            raise ValueError(f"the step has {tokens} input_ids and {len(batch.positions_T)} positions")
        rows = batch.logits_indices_N
        if len(rows) and not (rows.min() >= 0 and rows.max() < tokens):
            raise ValueError(f"logits_indices must be in [0, {tokens})")
        for g, blocks in self._blocks.items():
            group = batch.groups[g]
            cu, table, slots = group.cu_seqlens, group.block_table_BM, group.slot_mapping_T
            columns = self._input_columns.get(f"block_table.{g}", table.shape[1])
            if len(slots) != tokens or len(cu) != seqs + 1 or table.shape != (seqs, columns):
                raise ValueError(
                    f"KV group {g}: slot_mapping {slots.shape}, cu_seqlens {cu.shape} and block_table "
                    f"{table.shape} do not fit {tokens} tokens of {seqs} sequences and {columns} columns"
                )
            queries = cu[1:] - cu[:-1]
            if cu[0] != 0 or cu[-1] != tokens or queries.min() < 0:
                raise ValueError(f"KV group {g}: cu_seqlens must rise from 0 to {tokens}")
            lens = group.seq_lens_B
            size = self._block_size[g]
            if (lens < queries).any() or lens.max() > columns * size:
                raise ValueError(
                    f"KV group {g}: seq_lens must cover this step and fit {columns} blocks of {size}"
                )
            if slots.max() >= blocks * size or slots.min() < -1:
                raise ValueError(f"KV group {g}: slot_mapping must be in [-1, {blocks * size})")
            if table.min() < 0 or table.max() >= blocks:
                raise ValueError(f"KV group {g}: block_table must be in [0, {blocks})")

    def _captures(
        self, outputs: Sequence[str], values: dict[str, int]
    ) -> tuple[dict[str, Array], npt.NDArray[np.void]]:
        results: dict[str, Array] = {}
        rows = []
        for name in outputs:
            if name not in self._operand_by_name:
                raise KeyError(f"the plan has no tensor called {name}")
            o = self._operand_by_name[name]
            operand = self.plan.operands[o]
            dtype = self.plan.buffers[operand.buffer].dtype
            shape = tuple(values[d] if isinstance(d, str) else d for d in operand.shape)
            results[name] = np.empty(shape, _NUMPY_DTYPE.get(dtype, np.dtype(dtype)))
            rows.append((_address(results[name]), o, self._producer[o]))
        rows.sort(key=lambda row: row[2])
        return results, np.array(rows, _CAPTURE)

    # ---- Profiling ----

    def start_profile(self) -> None:
        """Time every instruction from now on (a barrier and a clock read each: a few per cent)."""
        self._seconds = np.zeros(len(self.plan.instructions), np.float64)
        self._calls = 0

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
