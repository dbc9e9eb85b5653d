"""Runs a plan on an NVIDIA GPU: inputs in through pinned memory, launches, logits or tokens out.

Decode steps and small others run as CUDA graphs (``graphs.py``). A submitted step runs while the host
prepares the next one, whose token ids may stand for tokens that are still being sampled.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pelton.dtypes import ITEMSIZE
from pelton.engine.artifact import Engine
from pelton.engine.batch import DecodeRun, Float32, InputBatch, StepResult
from pelton.engine.batch_sampling import Int32, SamplingInputs, StepLogprobs
from pelton.engine.cuda.code_check import read_code
from pelton.engine.cuda.edits import DeviceEdits
from pelton.engine.cuda.graphs import Padded, StepGraphs
from pelton.engine.cuda.inputs import DeviceInputs
from pelton.engine.cuda.kernel import EngineKernel
from pelton.engine.cuda.launcher import Launcher
from pelton.engine.cuda.sampler import DeviceSampler, Slot
from pelton.engine.cuda.weights import DeviceWeights
from pelton.engine.kv_cache import NUMPY_TYPES
from pelton.engine.plan import Instruction, Operand, Plan
from pelton.engine.step_inputs import decodes, step_dims
from pelton.errors import DeviceError
from pelton.kernels.gpu.driver import Device, Event, Memory, PinnedMemory, Stream, capture
from pelton.kernels.launch import COUNTER_BYTES
from pelton.kernels.sampling.cuda import LOGITS_KINDS

#: Steps in flight: one runs, one is prepared.
_SLOTS = 2


@dataclass(frozen=True)
class _Step:
    """What of a step is the same in all of its run."""

    run: DecodeRun | None
    rows: int
    """Rows of logits."""
    padded: Padded | None
    """To a graph; None: it runs as none."""
    dims: Mapping[str, int]
    """Padded to the graph's."""
    decodes: bool


def network_logits(plan: Plan) -> Operand | None:
    """The logits in the network's type, where the plan ends with making float32 of them."""
    last = plan.instructions[-1]
    if last.op != "to_float32" or tuple(last.outputs) != (plan.logits,):
        return None
    operand = plan.operands[last.inputs[0]]
    contiguous = tuple(operand.strides) == (operand.shape[1], 1)
    buffer = plan.buffers[operand.buffer]
    fits = contiguous and buffer.kind == "arena" and buffer.dtype in LOGITS_KINDS
    return operand if fits else None


class PendingTokens:
    """A submitted step (``engine.batch_sampling.PendingStep``)."""

    def __init__(self, slot: Slot, rows: int, edits: DeviceEdits | None) -> None:
        self._slot, self._rows, self._edits = slot, rows, edits
        self._tokens: Int32 | None = None

    def tokens(self) -> Int32:
        """The token of each row of logits, or why there is none. Waits for the GPU."""
        if self._tokens is None:
            self._slot.wait()
            self._slot.used = False
            self._tokens = self._slot.token_array[: self._rows].copy()
        return self._tokens

    def logprobs(self) -> StepLogprobs | None:
        """Where they were asked for."""
        return None if self._edits is None else self._edits.logprobs(self._slot.index, self._rows)


class CudaRunner:
    """Executes the plan of ``engine`` on ``device``, over KV caches of ``num_blocks`` blocks a group."""

    def __init__(self, engine: Engine, num_blocks: Sequence[int], device: Device) -> None:
        plan, root = engine.plan, engine.path
        self._plan, self._device = plan, device
        code = read_code(engine, device)
        device.make_current()
        self._stream = Stream()
        self._arena = Memory(plan.arena_bytes)
        self._workspace = Memory(COUNTER_BYTES + plan.workspace_bytes)
        self._workspace.fill(0, self._stream)
        named = [b.name for b in plan.buffers if b.kind in ("weight", "constant")]
        self._weights = DeviceWeights(engine.weights, named, device)
        self._caches: dict[tuple[str, int], Memory] = {}
        for b in plan.buffers:
            if b.kind in ("k_cache", "v_cache"):
                values = num_blocks[b.group] * int(np.prod([d for d in b.shape if isinstance(d, int)]))
                self._caches[b.kind, b.layer] = Memory(values * ITEMSIZE[b.dtype])
        assert engine.config.build.block_size
        self._inputs = DeviceInputs(plan, engine.config.build.block_size)
        self._inputs.clear(self._stream)
        rows = min(plan.dims["B"], plan.dims["N"])
        self._slots = itertools.cycle([Slot(i, rows, self._inputs.nbytes) for i in range(_SLOTS)])
        self._all_slots = [next(self._slots) for _ in range(_SLOTS)]
        self._launcher = Launcher(plan, code, root, self._address, self._workspace.address)
        logits = plan.operands[plan.logits]
        self._vocab = int(logits.shape[1])
        self._logits_address = self._address(logits)
        network = network_logits(plan)
        self._network = slice(None) if network is None else slice(-1)
        sampled = logits if network is None else network
        self._sampler = DeviceSampler(
            code,
            root,
            self._stream,
            seats=plan.dims["B"],
            rows=rows,
            vocab=self._vocab,
            logits=self._logits_address,
            network=(self._address(sampled), plan.buffers[sampled.buffer].dtype),
        )
        self._stage = EngineKernel(code, root, "stage")
        self._inputs.bind(self._stage, self._sampler.tokens_address)
        self._host_logits: PinnedMemory | None = None
        self._graphs = StepGraphs(plan.dims, self._stream)
        self._last: _Step | None = None
        self._producer = {
            plan.operands[o].buffer: i for i, ins in enumerate(plan.instructions) for o in ins.outputs
        }

    def _address(self, operand: Operand) -> int:
        buffer = self._plan.buffers[operand.buffer]
        offset = operand.offset * ITEMSIZE[buffer.dtype]
        match buffer.kind:
            case "arena":
                return self._arena.address + buffer.offset + offset
            case "input":
                return self._inputs.addresses[buffer.name] + offset
            case "weight" | "constant":
                return self._weights.addresses[buffer.name] + offset
            case "k_cache" | "v_cache":
                return self._caches[buffer.kind, buffer.layer].address + offset

    def run(self, batch: InputBatch, outputs: Sequence[str]) -> StepResult:
        """Compute one step; ``outputs`` names operands to copy when they are produced."""
        slot = self._begin()
        taken: dict[str, npt.NDArray[np.generic]] = {}
        take = self._taker(outputs, step_dims(batch), taken) if outputs else None
        rows = self._launch(batch, slot, take, scans=False)
        logits = self._logits(rows)
        assert self._host_logits is not None
        self._stream.copy_out(self._host_logits.address, self._logits_address, logits.nbytes)
        self._end(slot)
        slot.wait()
        return StepResult(logits_NV=logits, outputs=taken)

    def submit(self, batch: InputBatch, sampling: SamplingInputs) -> PendingTokens:
        """Start a step that samples a token from each of its rows of logits.

        Ids of ``batch`` below zero stand for tokens that the step submitted before samples: -1 for its
        first row. At most two steps are in flight: the caller takes a step's tokens before the next but one.
        """
        slot = self._begin()
        rows = len(batch.logits_indices_N)
        if rows:
            self._sampler.give(self._stream, sampling, rows, slot)
        scans = bool(rows) and not self._sampler.wants_float32(sampling)
        self._launch(batch, slot, None, scans=scans)
        if rows:
            self._sampler.sample(self._stream, sampling, rows, slot, scanned=scans)
        self._end(slot)
        wanted = rows and sampling.logprobs_N is not None
        return PendingTokens(slot, rows, self._sampler.edits if wanted else None)

    def _begin(self) -> Slot:
        self._device.make_current()
        slot = next(self._slots)
        slot.wait()
        return slot

    def _end(self, slot: Slot) -> None:
        slot.done.record(self._stream)
        slot.used = True

    def _launch(
        self, batch: InputBatch, slot: Slot, after: Callable[[int], None] | None, *, scans: bool
    ) -> int:
        """Put a step into the stream -> rows of logits.

        ``scans``: the sampler's scan with it, which reads the network's logits; else there are float32 ones.
        """
        step = self._last
        if step is None or batch.run is None or batch.run is not step.run:
            self._last = step = self._step(batch, graphs=after is None)
        self._inputs.stage(batch, step.dims, slot.inputs, decode=step.decodes)
        if after is not None:
            self._inputs.lay_out(step.dims, slot.inputs, self._stream)
            self._launcher.run(self._stream, step.dims, after, decodes=step.decodes)
            return step.rows
        if step.padded is not None and step.padded.decode:
            self._graphs.decode(step.padded, slot.index, scans, lambda: self._put(step, slot, scans))
        elif step.padded is not None:
            self._inputs.lay_out(step.dims, slot.inputs, self._stream)
            self._graphs.mixed(step.padded, lambda: self._run_network(step))
            if scans:
                self._sampler.scan(self._stream, step.rows, slot, dependent=False)
        else:
            self._put(step, slot, scans)
        if not scans and self._network.stop is not None:
            self._launcher.run(self._stream, step.dims, decodes=step.decodes, which=slice(-1, None))
        return step.rows

    def _put(self, step: _Step, slot: Slot, scans: bool) -> None:
        """A step's kernels into the stream, from its inputs to its tokens or logits."""
        self._inputs.lay_out(step.dims, slot.inputs, self._stream)
        self._run_network(step)
        if scans:
            self._sampler.scan(self._stream, step.dims["N"], slot, dependent=True)

    def _run_network(self, step: _Step) -> None:
        self._launcher.run(self._stream, step.dims, decodes=step.decodes, which=self._network)

    def _step(self, batch: InputBatch, *, graphs: bool) -> _Step:
        """``graphs``: whether it may run as a graph."""
        dims = step_dims(batch)
        decoding = decodes(batch)
        padded = self._graphs.padded(dims, decode=decoding) if graphs else None
        return _Step(batch.run, dims["N"], padded, dims if padded is None else padded.dims, decoding)

    def _logits(self, rows: int) -> Float32:
        """Pinned memory for ``rows`` rows of logits; no step is in flight that fills it."""
        if self._host_logits is None or self._host_logits.nbytes < 4 * rows * self._vocab:
            if self._host_logits is not None:
                self._host_logits.close()
            most = self._plan.dims["N"]
            self._host_logits = PinnedMemory(4 * min(most, max(16, 2 * rows)) * self._vocab)
        logits: Float32 = self._host_logits.array(np.float32).reshape(-1, self._vocab)
        return logits[:rows]

    def profile(self, batch: InputBatch) -> list[tuple[Instruction, float]]:
        """GPU milliseconds of each instruction of a step, between events in a graph of it.

        The host is not in them; what an event takes, a microsecond or so, is. Kernels do not overlap.
        """
        dims = step_dims(batch)
        slot = self._begin()
        decode = decodes(batch)
        self._inputs.stage(batch, dims, slot.inputs, decode=decode)
        self._inputs.lay_out(dims, slot.inputs, self._stream)
        self._launcher.run(self._stream, dims, decodes=decode)  # loads the kernels
        events = [Event(timing=True) for _ in range(len(self._plan.instructions) + 1)]
        with capture(self._stream) as captured:
            events[0].record(self._stream, captured=True)
            after = lambda i: events[i + 1].record(self._stream, captured=True)
            self._launcher.run(self._stream, dims, after, decodes=decode)
        assert captured.graph is not None
        captured.graph.launch(self._stream)
        self._end(slot)
        self._stream.wait()
        times = [b.milliseconds_since(a) for a, b in itertools.pairwise(events)]
        captured.graph.close()
        for event in events:
            event.close()
        return list(zip(self._plan.instructions, times, strict=True))

    def read_caches(self) -> dict[tuple[str, int], npt.NDArray[np.generic]]:
        """A copy of each layer's cache, by kind (k_cache, v_cache) and layer; see ``NUMPY_TYPES``."""
        self._device.make_current()
        found: dict[tuple[str, int], npt.NDArray[np.generic]] = {}
        for buffer in self._plan.buffers:
            if buffer.kind in ("k_cache", "v_cache"):
                memory = self._caches[buffer.kind, buffer.layer]
                flat = np.empty(memory.nbytes // ITEMSIZE[buffer.dtype], NUMPY_TYPES[buffer.dtype])
                self._stream.copy_out(flat.ctypes.data, memory.address, flat.nbytes)
                self._stream.wait()
                rest = [d for d in buffer.shape if isinstance(d, int)]
                found[buffer.kind, buffer.layer] = flat.reshape(-1, *rest)
        return found

    def zero_caches(self) -> None:
        """For comparisons: what no token has written compares equal."""
        self._device.make_current()
        for memory in self._caches.values():
            memory.fill(0, self._stream)
        self._stream.wait()

    def reload(self, engine: Engine) -> None:
        """Copy the weights of ``engine``, which has the same plan, over this one's. Between steps only."""
        self._device.make_current()
        self._stream.wait()
        self._weights.load(engine.weights)

    def _taker(
        self, names: Sequence[str], dims: Mapping[str, int], taken: dict[str, npt.NDArray[np.generic]]
    ) -> Callable[[int], None]:
        """What copies operands after the instruction that makes their buffer."""
        wanted: dict[int, list[Operand]] = {}
        for operand in self._plan.operands:
            if operand.name in names and operand.buffer in self._producer:
                wanted.setdefault(self._producer[operand.buffer], []).append(operand)

        def take(index: int) -> None:
            for operand in wanted.get(index, ()):
                taken[operand.name] = self._copy(operand, dims)

        return take

    def _copy(self, operand: Operand, dims: Mapping[str, int]) -> npt.NDArray[np.generic]:
        """A contiguous copy of an operand; bfloat16 as its bits in uint16."""
        dtype = self._plan.buffers[operand.buffer].dtype
        shape = [dims[d] if isinstance(d, str) else d for d in operand.shape]
        span = sum((n - 1) * s for n, s in zip(shape, operand.strides, strict=True)) + 1
        flat = np.empty(span, np.uint16 if dtype == "bfloat16" else dtype)
        self._stream.copy_out(flat.ctypes.data, self._address(operand), flat.nbytes)
        self._stream.wait()
        strides = [s * flat.itemsize for s in operand.strides]
        view: npt.NDArray[np.generic] = np.lib.stride_tricks.as_strided(flat, shape, strides)
        return view.copy()

    def close(self) -> None:
        """Free everything on the device; idempotent."""
        with contextlib.suppress(DeviceError):  # a GPU that failed has nothing to wait for
            self._device.make_current()
            self._stream.wait()
        self._graphs.close()
        for part in (self._launcher, self._sampler, self._stage, self._weights, self._inputs):
            part.close()
        for slot in self._all_slots:
            slot.close()
        for memory in (self._arena, self._workspace, *self._caches.values()):
            memory.close()
        if self._host_logits is not None:
            self._host_logits.close()
        self._stream.close()
