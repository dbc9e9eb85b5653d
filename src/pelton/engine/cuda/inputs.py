"""A step's inputs on the GPU: fixed places, filled from pinned memory, padded up to a graph's sizes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from pelton.engine.batch import InputBatch
from pelton.engine.plan import Dim, Plan
from pelton.engine.shards import align
from pelton.engine.step_inputs import step_inputs
from pelton.kernels.gpu.driver import Memory, PinnedMemory, Stream

#: What stands in padded rows: slots that write nothing; sequences without keys (0).
_PADDING = {"slot_mapping": -1}
#: First dimension of an input, where it is not T.
_FIRST_DIM = {"block_table": "B", "seq_lens": "B", "cu_seqlens": "B+1", "logits_indices": "N"}

Int32 = npt.NDArray[np.int32]


class DeviceInputs:
    """Device memory for every input of ``plan`` at its largest; ``addresses`` by name."""

    def __init__(self, plan: Plan) -> None:
        shapes = {b.name: [largest(plan, d) for d in b.shape] for b in plan.buffers if b.kind == "input"}
        self._shapes, self._offsets, self.nbytes = shapes, {}, 0
        for name, shape in shapes.items():
            self._offsets[name] = self.nbytes
            self.nbytes += align(4 * int(np.prod(shape)))
        self.memory = Memory(self.nbytes)
        self.addresses = {name: self.memory.address + offset for name, offset in self._offsets.items()}

    def stage(self, batch: InputBatch, dims: Mapping[str, int], host: PinnedMemory, stream: Stream) -> None:
        """Copy ``batch`` through ``host`` (``nbytes`` of it), padded to ``dims``."""
        whole: Int32 = host.array(np.int32)
        for name, array in step_inputs(batch).items():
            if name not in self._offsets:
                continue
            kind = name.split(".")[0]
            offset, row = self._offsets[name], int(np.prod(self._shapes[name][1:]))
            n, wanted = len(array), dims[_FIRST_DIM.get(kind, "T")]
            staged = whole[offset // 4 : offset // 4 + wanted * row].reshape(wanted, row)
            staged[:n] = array.reshape(n, row)
            if wanted > n:
                # Padded sequences have one token each, like the others.
                ends = np.arange(n, wanted)[:, None] if kind == "cu_seqlens" else _PADDING.get(kind, 0)
                staged[n:] = ends
            stream.copy_in(self.addresses[name], host.address + offset, staged.nbytes)

    def close(self) -> None:
        self.memory.close()


def largest(plan: Plan, dim: Dim) -> int:
    """The greatest value of a dimension."""
    if isinstance(dim, int):
        return dim
    return plan.dims["B"] + 1 if dim == "B+1" else plan.dims[dim]
