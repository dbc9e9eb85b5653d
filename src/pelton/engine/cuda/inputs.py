"""A step's inputs on the GPU: fixed places, filled by one kernel, padded up to a graph's sizes.

``stage`` writes a step into page-locked memory, ``lay_out`` launches the kernel, whose arguments are the same
in all steps of one size: a graph can have it.

Of block tables only what has changed is sent: the host remembers what the device has. Hot.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pelton.engine.batch import DecodeRun, InputBatch
from pelton.engine.cuda.kernel import EngineKernel
from pelton.engine.plan import Dim, Plan
from pelton.engine.shards import align
from pelton.kernels.gpu.driver import Memory, PinnedMemory, Stream
from pelton.kernels.stage.cuda import HEADER, SEGMENTS, Segments, stage_programs

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class _Staged:
    """Page-locked memory that holds a step; of its run's next steps only these places change."""

    run: DecodeRun | None
    dims: Mapping[str, int]
    counts: Int32
    """How many ``pairs`` there are."""
    positions_B: Int32
    seq_lens_B: Int32
    slots_GB: list[Int32]
    pairs: Int32


class DeviceInputs:
    """Device memory for every input of ``plan`` at its largest; ``addresses`` by name.

    ``nbytes``: page-locked memory that staging a step needs. Block tables have a column for each
    ``block_size`` tokens.
    """

    def __init__(self, plan: Plan, block_size: int) -> None:
        self._block_size = block_size
        offsets, total, values, pairs = {}, 0, 0, 0
        sizes: dict[str, Dim] = {}
        tables: dict[str, tuple[int, ...]] = {}
        for b in plan.buffers:
            if b.kind == "input":
                shape = tuple(largest(plan, d) for d in b.shape)
                offsets[b.name] = total // 4
                size = int(np.prod(shape))
                total += align(4 * size)
                if b.name.startswith("block_table"):
                    tables[b.name] = shape
                    pairs += size
                else:
                    values += size
                    sizes[b.name] = b.shape[0]
        self._offsets = offsets
        self.nbytes = 4 * (HEADER + values + 2 * pairs)
        self.memory = Memory(total)
        self.addresses = {name: self.memory.address + 4 * offset for name, offset in offsets.items()}
        groups = len(tables)
        assert 5 + groups <= SEGMENTS, f"{groups} KV groups"
        self._tables = [np.zeros(tables[f"block_table.{g}"], np.int32) for g in range(groups)]
        """The block tables that the device has, or will have when the steps in flight run."""
        # Their order is that of the addresses, so that distances grow.
        self._sizes = dict(sorted(sizes.items(), key=lambda item: offsets[item[0]]))
        """Of all inputs but block tables, in the order in which they are packed."""
        assert next(iter(self._sizes)) == "input_ids"
        self._range: Int32 = np.arange(plan.dims["B"] + 1, dtype=np.int32)
        self._n, self._ids, self._segments = C.c_int32(), C.c_int32(), Segments()
        self._segments.starts[:] = [np.iinfo(np.int32).max] * SEGMENTS
        self._run: DecodeRun | None = None
        """That of the step staged last."""
        self._staged: dict[int, _Staged] = {}
        """By the address of page-locked memory, what is still in it."""

    def clear(self, stream: Stream) -> None:
        """Make the device's block tables what the host takes them for."""
        self.memory.fill(0, stream)

    def bind(self, kernel: EngineKernel, sampled: int) -> None:
        """``kernel`` lays inputs out; ``sampled``: address of the tokens that the step before samples."""
        self._packed = C.c_uint64()
        self._kernel = kernel
        addresses = C.c_uint64(self.memory.address), C.c_uint64(sampled)
        kernel.bind([self._packed, *addresses, self._n, self._ids, self._segments])

    def lay_out(self, dims: Mapping[str, int], host: PinnedMemory, stream: Stream) -> None:
        """Bring what is staged in ``host``, a step of ``dims``, to its places."""
        values = 0
        for i, (name, size) in enumerate(self._sizes.items()):
            self._segments.starts[i], self._segments.shifts[i] = values, self._offsets[name] - values
            values += size if isinstance(size, int) else dims[size]
        self._n.value, self._ids.value = values, dims["T"]
        self._packed.value = host.address
        pairs = dims["B"] * sum(table.shape[1] for table in self._tables)
        self._kernel.run(stream, stage_programs(values, pairs))

    def stage(self, batch: InputBatch, dims: Mapping[str, int], host: PinnedMemory, *, decode: bool) -> None:
        """Put ``batch`` into ``host`` (``nbytes`` of it), padded to ``dims``.

        Sequences that it is padded with have one token each where it is a ``decode`` step, else none.
        """
        staged = self._staged.get(host.address)
        again = batch.run is not None and batch.run is self._run
        if again and staged is not None and staged.run is batch.run and staged.dims == dims:
            self._write(batch, staged)
        else:
            whole: Int32 = host.array(np.int32)
            staged = self._place(batch, dims, whole, self._pack(batch, dims, whole, decode))
            self._staged.pop(host.address, None)
            if again:  # of a run's first step the token ids change too
                self._staged[host.address] = staged
        staged.counts[0] = self._begun(batch, staged.pairs) if again else self._changes(batch, staged.pairs)
        self._run = batch.run

    def _place(
        self, batch: InputBatch, dims: Mapping[str, int], whole: Int32, at: Mapping[str, int]
    ) -> _Staged:
        """Where in page-locked memory lies what a run's next step changes."""
        rows = len(batch.groups[0].seq_lens_B)
        slots = [at[f"slot_mapping.{g}"] for g in range(len(batch.groups))]
        return _Staged(
            run=batch.run,
            dims=dict(dims),
            counts=whole[:1],
            positions_B=whole[at["positions"] :][:rows],
            seq_lens_B=whole[at["seq_lens"] :][:rows],
            slots_GB=[whole[start : start + rows] for start in slots],
            pairs=whole[at["end"] :],
        )

    @staticmethod
    def _write(batch: InputBatch, staged: _Staged) -> None:
        """What a run's next step changes."""
        staged.positions_B[:] = batch.positions_T
        staged.seq_lens_B[:] = batch.groups[0].seq_lens_B
        for slots_B, group in zip(staged.slots_GB, batch.groups, strict=True):
            slots_B[:] = group.slot_mapping_T

    def _begun(self, batch: InputBatch, pairs: Int32) -> int:
        """As ``_changes`` of a run's next step: entries of tokens that begin a block."""
        positions_B, size, count = batch.positions_T, self._block_size, 0
        rows = (positions_B % size == 0).nonzero()[0]
        if len(rows):
            cols = positions_B[rows] // size
            for g, group in enumerate(batch.groups):
                count = self._send(g, rows, cols, group.slot_mapping_T[rows] // size, pairs, count)
        return count

    def _send(
        self, group: int, rows: npt.NDArray[np.intp], cols: Int32, values: Int32, pairs: Int32, count: int
    ) -> int:
        """Add entries of a block table to the ``count`` ``pairs`` -> how many there are then."""
        mirror, end = self._tables[group], count + len(rows)
        mirror[rows, cols] = values
        new = pairs[2 * count : 2 * end]
        new[0::2] = rows * mirror.shape[1] + cols + self._offsets[f"block_table.{group}"]
        new[1::2] = values
        return end

    def _pack(self, batch: InputBatch, dims: Mapping[str, int], whole: Int32, decode: bool) -> dict[str, int]:
        """Values -> where each input begins, and the ``end``."""
        at, first = HEADER, batch.groups[0]
        places = {}
        for name in self._sizes:
            padding: int | Int32
            match name.split("."):
                case ["input_ids"]:
                    array, wanted, padding = batch.input_ids_T, dims["T"], 0
                case ["positions"]:
                    array, wanted, padding = batch.positions_T, dims["T"], 0
                case ["logits_indices"]:
                    array, wanted, padding = batch.logits_indices_N, dims["N"], 0
                case ["cu_seqlens"]:
                    array, wanted = first.cu_seqlens, dims["B+1"]
                    padding = self._range[len(array) : wanted] if decode else int(array[-1])
                case ["seq_lens"]:  # padded sequences have no keys
                    array, wanted, padding = first.seq_lens_B, dims["B"], 0
                case ["slot_mapping", group]:  # and padded tokens write none
                    array, wanted, padding = batch.groups[int(group)].slot_mapping_T, dims["T"], -1
                case _:
                    raise AssertionError(name)
            places[name] = at
            end = at + len(array)
            whole[at:end] = array
            at += wanted
            if at > end:
                whole[end:at] = padding
        places["end"] = at
        return places

    def _changes(self, batch: InputBatch, pairs: Int32) -> int:
        """Places and values of the block tables' entries that the device does not have -> how many."""
        count = 0
        columns = -(-int(batch.groups[0].seq_lens_B.max(initial=0)) // self._block_size)
        for g, group in enumerate(batch.groups):
            wanted = group.block_table_BM[:, :columns]
            had = self._tables[g][: len(wanted), :columns]
            changed = np.flatnonzero((wanted != had).ravel())
            if len(changed):
                rows, cols = np.divmod(changed, columns)
                count = self._send(g, rows, cols, wanted[rows, cols], pairs, count)
        return count

    def close(self) -> None:
        self.memory.close()


def largest(plan: Plan, dim: Dim) -> int:
    """The greatest value of a dimension."""
    if isinstance(dim, int):
        return dim
    return plan.dims["B"] + 1 if dim == "B+1" else plan.dims[dim]
