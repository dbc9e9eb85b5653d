"""Runs a plan on an NVIDIA GPU: inputs in through pinned memory, launches, logits out.

Steps in which every sequence gets one token (decode) are captured into CUDA graphs, one per bucket of
sequences, at first use: a smaller step is padded with sequences that own no KV.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from pelton.dtypes import ITEMSIZE
from pelton.engine.artifact import Engine
from pelton.engine.batch import Float32, InputBatch, StepResult
from pelton.engine.cuda.code import Code
from pelton.engine.cuda.launcher import Launcher
from pelton.engine.cuda.weights import DeviceWeights
from pelton.engine.plan import Buffer, Instruction, Operand
from pelton.engine.shards import align
from pelton.engine.step_inputs import step_dims, step_inputs
from pelton.errors import EngineError
from pelton.kernels.gpu.driver import Device, Event, Graph, Memory, PinnedMemory, Stream, capture
from pelton.kernels.launch import COUNTER_BYTES

#: Decode steps of at most so many sequences run as graphs.
_LARGEST_GRAPH = 512
#: What stands in padded rows: slots that write nothing, sequences without keys.
_PADDING = {"slot_mapping": -1}
#: First dimension of an input, where it is not T.
_FIRST_DIM = {"block_table": "B", "seq_lens": "B", "cu_seqlens": "B+1", "logits_indices": "N"}


def graph_sizes(largest: int) -> tuple[int, ...]:
    """Buckets of sequences: powers of two up to 8, then steps of an eighth to a quarter."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < min(largest, _LARGEST_GRAPH):
        sizes.append(sizes[-1] + max(8, sizes[-1] // 4 // 8 * 8))
    return tuple(s for s in sizes if s < largest) + ((largest,) if largest <= _LARGEST_GRAPH else ())


class CudaRunner:
    """Executes the plan of ``engine`` on ``device``, over KV caches of ``num_blocks`` blocks a group."""

    def __init__(self, engine: Engine, num_blocks: Sequence[int], device: Device) -> None:
        plan, root = engine.plan, engine.path
        self._plan, self._device = plan, device
        code = msgspec.json.decode((root / "compiled" / "code.json").read_bytes(), type=Code)
        if code.sm // 10 != device.sm // 10 or code.sm > device.sm:
            raise EngineError(
                f"{root} was built for sm_{code.sm} GPUs and {device.name} is sm_{device.sm}; rebuild it here"
            )
        self._stream = Stream()
        self._arena = Memory(plan.arena_bytes)
        self._workspace = Memory(COUNTER_BYTES + plan.workspace_bytes)
        self._workspace.fill(0, self._stream)
        named = [b.name for b in plan.buffers if b.kind in ("weight", "constant")]
        self._weights = DeviceWeights(engine.weights, named)
        self._caches: dict[tuple[str, int], Memory] = {}
        for b in plan.buffers:
            if b.kind in ("k_cache", "v_cache"):
                values = num_blocks[b.group] * int(np.prod([d for d in b.shape if isinstance(d, int)]))
                self._caches[b.kind, b.layer] = Memory(values * ITEMSIZE[b.dtype])
        self._place_inputs()
        self._launcher = Launcher(plan, code, root, self._address, self._workspace.address)
        logits = plan.operands[plan.logits]
        self._vocab = int(logits.shape[1])
        self._logits_address = self._address(logits)
        self._host_logits = PinnedMemory(4 * plan.dims["N"] * self._vocab)
        self._logits: Float32 = self._host_logits.array(np.float32).reshape(-1, self._vocab)
        self._sizes = graph_sizes(min(plan.dims["B"], plan.dims["N"]))
        self._graphs: dict[int, Graph] = {}

    def _place_inputs(self) -> None:
        """One pinned and one device region for all inputs, each at its largest."""
        self._inputs: dict[str, tuple[int, npt.NDArray[np.int32]]] = {}
        offsets, total = {}, 0
        for b in self._plan.buffers:
            if b.kind == "input":
                offsets[b.name] = (b, total)
                total += align(4 * int(np.prod([self._largest(d) for d in b.shape])))
        self._input_memory, self._input_host = Memory(total), PinnedMemory(total)
        whole = self._input_host.array(np.int32)
        for name, (b, offset) in offsets.items():
            shape = [self._largest(d) for d in b.shape]
            array = whole[offset // 4 : offset // 4 + int(np.prod(shape))].reshape(shape)
            self._inputs[name] = (offset, array)

    def _largest(self, dim: int | str) -> int:
        if isinstance(dim, int):
            return dim
        return self._plan.dims["B"] + 1 if dim == "B+1" else self._plan.dims[dim]

    def _address(self, operand: Operand) -> int:
        buffer: Buffer = self._plan.buffers[operand.buffer]
        offset = operand.offset * ITEMSIZE[buffer.dtype]
        match buffer.kind:
            case "arena":
                return self._arena.address + buffer.offset + offset
            case "input":
                return self._input_memory.address + self._inputs[buffer.name][0] + offset
            case "weight" | "constant":
                return self._weights.addresses[buffer.name] + offset
            case "k_cache" | "v_cache":
                return self._caches[buffer.kind, buffer.layer].address + offset

    def run(self, batch: InputBatch, outputs: Sequence[str]) -> StepResult:
        """Compute one step; ``outputs`` names operands to copy when they are produced."""
        self._device.make_current()
        dims = step_dims(batch)
        rows = dims["N"]
        size = self._graph_size(batch, dims) if not outputs else 0
        if size:
            dims = {"T": size, "B": size, "B+1": size + 1, "N": size}
        self._stage(batch, dims)
        taken: dict[str, npt.NDArray[np.generic]] = {}
        if size:
            if size not in self._graphs:
                with capture(self._stream) as captured:
                    self._launcher.run(self._stream, dims)
                assert captured.graph is not None
                self._graphs[size] = captured.graph
            self._graphs[size].launch(self._stream)
        else:
            self._launcher.run(self._stream, dims, self._taker(outputs, dims, taken) if outputs else None)
        self._stream.copy_out(self._host_logits.address, self._logits_address, 4 * rows * self._vocab)
        self._stream.wait()
        return StepResult(logits_NV=self._logits[:rows], outputs=taken)

    def profile(self, batch: InputBatch) -> list[tuple[Instruction, float]]:
        """GPU milliseconds of each instruction of a step, launched one by one (no graph)."""
        self._device.make_current()
        dims = step_dims(batch)
        for _ in range(2):  # the first loads the kernels
            self._stage(batch, dims)
            events = [Event(timing=True) for _ in range(len(self._plan.instructions) + 1)]
            events[0].record(self._stream)
            self._launcher.run(self._stream, dims, lambda i: events[i + 1].record(self._stream))  # noqa: B023
            self._stream.wait()
        times = [b.milliseconds_since(a) for a, b in itertools.pairwise(events)]
        for event in events:
            event.close()
        return list(zip(self._plan.instructions, times, strict=True))

    def reload(self, engine: Engine) -> None:
        """Copy the weights of ``engine``, which has the same plan, over this one's. Between steps only."""
        self._device.make_current()
        self._stream.wait()
        self._weights.load(engine.weights)

    def _graph_size(self, batch: InputBatch, dims: dict[str, int]) -> int:
        """The bucket of a step in which each sequence has one token and wants its logits; else 0."""
        if not dims["T"] == dims["B"] == dims["N"]:
            return 0
        return next((size for size in self._sizes if size >= dims["B"]), 0)

    def _stage(self, batch: InputBatch, dims: dict[str, int]) -> None:
        for name, array in step_inputs(batch).items():
            if name not in self._inputs:
                continue
            offset, staged = self._inputs[name]
            n = len(array)
            staged[:n] = array
            wanted = dims[_FIRST_DIM.get(name.split(".")[0], "T")]
            if wanted > n:
                if name == "cu_seqlens":
                    staged[n:wanted] = np.arange(n, wanted, dtype=np.int32)
                else:
                    staged[n:wanted] = _PADDING.get(name.split(".")[0], 0)
            self._stream.copy_in(
                self._input_memory.address + offset, self._input_host.address + offset, staged[:wanted].nbytes
            )

    def _taker(
        self, names: Sequence[str], dims: dict[str, int], taken: dict[str, npt.NDArray[np.generic]]
    ) -> Callable[[int], None]:
        wanted = frozenset(names)

        def take(index: int) -> None:
            for o in self._plan.instructions[index].outputs:
                operand = self._plan.operands[o]
                if operand.name not in wanted:
                    continue
                dtype = self._plan.buffers[operand.buffer].dtype
                shape = [dims[d] if isinstance(d, str) else d for d in operand.shape]
                values = np.empty(shape, np.uint16 if dtype == "bfloat16" else dtype)
                self._stream.copy_out(values.ctypes.data, self._address(operand), values.nbytes)
                self._stream.wait()
                if dtype == "bfloat16":
                    values = (values.astype(np.uint32) << 16).view(np.float32)
                taken[operand.name] = values

        return take

    def close(self) -> None:
        """Free everything on the device; idempotent."""
        self._device.make_current()
        self._stream.wait()
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self._launcher.close()
        self._weights.close()
        for memory in (self._arena, self._workspace, self._input_memory, *self._caches.values()):
            memory.close()
        self._input_host.close()
        self._stream.close()
