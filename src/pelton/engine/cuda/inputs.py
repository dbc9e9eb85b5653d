"""A step's inputs on the GPU: fixed places, filled by one kernel, padded up to a graph's sizes.

Of block tables only what has changed is sent: the host remembers what the device has. Hot.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from pelton.engine.batch import InputBatch
from pelton.engine.cuda.kernel import EngineKernel
from pelton.engine.plan import Dim, Plan
from pelton.engine.shards import align
from pelton.kernels.gpu.driver import Memory, PinnedMemory, Stream
from pelton.kernels.stage.cuda import BLOCK, SEGMENTS

Int32 = npt.NDArray[np.int32]


class DeviceInputs:
    """Device memory for every input of ``plan`` at its largest; ``addresses`` by name.

    ``nbytes``: page-locked memory that staging a step needs. Block tables have a column for each
    ``block_size`` tokens.
    """

    def __init__(self, plan: Plan, block_size: int) -> None:
        self._block_size = block_size
        offsets, total, values, pairs = {}, 0, 0, 0
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
        self._offsets = offsets
        self.nbytes = 4 * (2 * SEGMENTS + values + 2 * pairs)
        self.memory = Memory(total)
        self.addresses = {name: self.memory.address + 4 * offset for name, offset in offsets.items()}
        groups = len(tables)
        assert 5 + groups <= SEGMENTS, f"{groups} KV groups"
        self._tables = [np.zeros(tables[f"block_table.{g}"], np.int32) for g in range(groups)]
        """The block tables that the device has, or will have when the steps in flight run."""
        # Their order is that of the addresses, so that distances grow.
        self._values = sorted((n for n in offsets if n not in tables), key=offsets.__getitem__)
        assert self._values[0] == "input_ids"
        self._range: Int32 = np.arange(plan.dims["B"] + 1, dtype=np.int32)
        self._n, self._ids, self._pairs = C.c_int32(), C.c_int32(), C.c_int32()

    def clear(self, stream: Stream) -> None:
        """Make the device's block tables what the host takes them for."""
        self.memory.fill(0, stream)

    def bind(self, kernel: EngineKernel, sampled: int) -> None:
        """``kernel`` lays inputs out; ``sampled``: address of the tokens that the step before samples."""
        self._packed = C.c_uint64()
        self._kernel = kernel
        addresses = C.c_uint64(self.memory.address), C.c_uint64(sampled)
        kernel.bind([self._packed, *addresses, self._n, self._ids, self._pairs])

    def stage(self, batch: InputBatch, dims: Mapping[str, int], host: PinnedMemory, stream: Stream) -> None:
        """Put ``batch`` through ``host`` (``nbytes`` of it) into place, padded to ``dims``."""
        whole: Int32 = host.array(np.int32)
        n = self._pack(batch, dims, whole)
        pairs = self._changes(batch, whole[n:])
        self._n.value, self._ids.value, self._pairs.value = n - 2 * SEGMENTS, dims["T"], pairs
        self._packed.value = host.address
        self._kernel.run(stream, -(-max(n, pairs) // BLOCK))

    def _pack(self, batch: InputBatch, dims: Mapping[str, int], whole: Int32) -> int:
        """Header and values -> the number of both."""
        at, first = 2 * SEGMENTS, batch.groups[0]
        starts, shifts = [], []
        for name in self._values:
            match name.split("."):
                case ["input_ids"]:
                    array, wanted, padding = batch.input_ids_T, dims["T"], 0
                case ["positions"]:
                    array, wanted, padding = batch.positions_T, dims["T"], 0
                case ["logits_indices"]:
                    array, wanted, padding = batch.logits_indices_N, dims["N"], 0
                case ["cu_seqlens"]:
                    array, wanted, padding = first.cu_seqlens, dims["B+1"], 0
                case ["seq_lens"]:  # padded sequences have no keys
                    array, wanted, padding = first.seq_lens_B, dims["B"], 0
                case ["slot_mapping", group]:  # and write none
                    array, wanted, padding = batch.groups[int(group)].slot_mapping_T, dims["T"], -1
                case _:
                    raise AssertionError(name)
            starts.append(at - 2 * SEGMENTS)
            shifts.append(self._offsets[name] - starts[-1])
            end = at + len(array)
            whole[at:end] = array
            at += wanted
            if at > end:
                # Padded sequences have one token each, like the others.
                whole[end:at] = self._range[len(array) : wanted] if name == "cu_seqlens" else padding
        whole[: len(starts)] = starts
        whole[len(starts) : SEGMENTS] = np.iinfo(np.int32).max
        whole[SEGMENTS : SEGMENTS + len(shifts)] = shifts
        return at

    def _changes(self, batch: InputBatch, pairs: Int32) -> int:
        """Places and values of the block tables' entries that the device does not have -> how many."""
        count = 0
        columns = -(-int(batch.groups[0].seq_lens_B.max(initial=0)) // self._block_size)
        for g, group in enumerate(batch.groups):
            mirror = self._tables[g]
            wanted = group.block_table_BM[:, :columns]
            had = mirror[: len(wanted), :columns]
            changed = np.flatnonzero((wanted != had).ravel())
            if len(changed):
                rows, cols = np.divmod(changed, columns)
                values = wanted[rows, cols]
                had[rows, cols] = values
                new = pairs[2 * count : 2 * (count + len(rows))]
                new[0::2] = rows * mirror.shape[1] + cols + self._offsets[f"block_table.{g}"]
                new[1::2] = values
                count += len(rows)
        return count

    def close(self) -> None:
        self.memory.close()


def largest(plan: Plan, dim: Dim) -> int:
    """The greatest value of a dimension."""
    if isinstance(dim, int):
        return dim
    return plan.dims["B"] + 1 if dim == "B+1" else plan.dims[dim]
