"""Sampling on the GPU: parameters in, tokens out, the step's logits stay where they are."""

from __future__ import annotations

import ctypes as C
from pathlib import Path

import numpy as np

from pelton.engine.batch_sampling import Float32, Int32, SamplingInputs
from pelton.engine.cuda.code import Code
from pelton.engine.cuda.edits import DeviceEdits, edit_bytes
from pelton.engine.cuda.kernel import EngineKernel
from pelton.engine.shards import align
from pelton.kernels.gpu.driver import Event, Memory, PinnedMemory, Stream
from pelton.kernels.sampling.cuda import LOGITS_KINDS, SamplerBytes, sampler_blocks

_FIELDS = ("temperature_N", "top_k_N", "top_p_N", "min_p_N", "uniform_N")


class Slot:
    """Page-locked memory for one step in flight: what the GPU reads and writes by itself."""

    def __init__(self, index: int, rows: int, input_bytes: int) -> None:
        self.index = index
        self.inputs = PinnedMemory(input_bytes)
        self.parameters = PinnedMemory(len(_FIELDS) * align(4 * rows))
        self.parameter_arrays: Int32 = self.parameters.array(np.int32).reshape(len(_FIELDS), -1)
        self.tokens = PinnedMemory(4 * rows)
        self.token_array: Int32 = self.tokens.array(np.int32)
        self.done = Event()
        self.used = False

    def wait(self) -> None:
        """Until the step that used it last is over."""
        if self.used:
            self.done.wait()

    def close(self) -> None:
        self.done.close()
        for memory in (self.inputs, self.parameters, self.tokens):
            memory.close()


def sampler_bytes(seats: int, rows: int, vocab: int) -> int:
    """Device memory that sampling takes, of which what edits need when a request first has any."""
    return rows * (4 + SamplerBytes.of(vocab).whole) + edit_bytes(seats, rows, vocab)


class DeviceSampler:
    """Takes tokens from ``logits``, at most ``rows`` a step, of sequences in ``seats`` seats.

    ``logits``: the address of float32 ones, which are there where ``wants_float32`` says so; ``network``:
    address and type of those that the network computes, which are there always.
    """

    def __init__(
        self,
        code: Code,
        root: Path,
        stream: Stream,
        *,
        seats: int,
        rows: int,
        vocab: int,
        logits: int,
        network: tuple[int, str],
    ) -> None:
        self._vocab, self._stride = vocab, align(4 * rows)
        sizes = SamplerBytes.of(vocab)
        self._memory = {name: Memory(rows * size) for name, size in vars(sizes).items()}
        for name in ("rows", "bins"):
            self._memory[name].fill(0, stream)
        self._tokens = Memory(4 * rows)
        self._given = Memory(len(_FIELDS) * self._stride)
        self._given.fill(0, stream)
        self._held: SamplingInputs | None = None
        """Whose parameters ``_given`` has, the random numbers aside."""
        self._greedy: Float32 | None = None
        """Temperatures of the last step that drew nothing."""
        self._cuts = self._chooses = False
        """Whether a row of ``_held`` has top-k or top-p, or these or min-p."""
        self._parameters = [C.c_uint64(self._given.address + i * self._stride) for i in range(len(_FIELDS))]
        self._host_tokens = C.c_uint64()
        at = {name: C.c_uint64(memory.address) for name, memory in self._memory.items()}
        tokens = C.c_uint64(self._tokens.address), self._host_tokens
        self._scan, self._histogram, self._choose = (
            EngineKernel(code, root, name) for name in ("scan", "histogram", "choose")
        )
        self._sources = (logits, LOGITS_KINDS["float32"]), (network[0], LOGITS_KINDS[network[1]])
        self._logits, self._kind = C.c_uint64(), C.c_int32()
        shared = [self._logits, self._kind, *self._parameters, at["rows"], at["pieces"]]
        self._scan.bind([*shared, *tokens])
        self._histogram.bind([*shared, at["bins"]])
        self._choose.bind([*shared, at["lists"], *tokens])
        self.edits = DeviceEdits(
            code, root, seats=seats, rows=rows, vocab=vocab, logits=logits, tokens=self._tokens.address
        )

    @property
    def tokens_address(self) -> int:
        """Where the tokens of the step that samples next will be, and those of the one before are."""
        return self._tokens.address

    @staticmethod
    def wants_float32(inputs: SamplingInputs) -> bool:
        """Whether a step's logits must be there as float32: edits and log-probabilities are of those."""
        return inputs.edits is not None or inputs.logprobs_N is not None

    def give(self, stream: Stream, inputs: SamplingInputs, rows: int, slot: Slot) -> None:
        """Bring the parameters of a step of ``rows`` rows to the device, where it has others."""
        if self._draws(inputs):
            self._give(stream, inputs, rows, slot)
        elif self._held is not None:  # no temperature is 0
            stream.fill(self._given.address, 0, self._stride)
            self._held = None

    def scan(self, stream: Stream, rows: int, slot: Slot, *, dependent: bool) -> None:
        """Of the network's logits the tokens of rows that are greedy or draw from all; a graph can have it.

        They arrive in ``slot``. ``rows`` may be more than were given: those get some token.
        ``dependent``: ahead of it in the stream is a kernel, for whose end it may wait itself.
        """
        self._host_tokens.value = slot.tokens.address
        self._logits.value, self._kind.value = self._sources[1]
        self._scan.run(stream, sampler_blocks(self._vocab, rows), rows, dependent=dependent)

    def sample(self, stream: Stream, inputs: SamplingInputs, rows: int, slot: Slot, *, scanned: bool) -> None:
        """Sample ``rows`` rows, whose parameters were given; their tokens arrive in ``slot``.

        ``scanned``: ``scan`` was part of the step."""
        self._host_tokens.value = slot.tokens.address
        self._logits.value, self._kind.value = self._sources[not self.wants_float32(inputs)]
        blocks = sampler_blocks(self._vocab, rows)
        self.edits.before(stream, inputs, rows, slot.index)
        if not scanned:
            self._scan.run(stream, blocks, rows)
        if self._held is not None:
            if self._cuts:
                self._histogram.run(stream, blocks, rows)
            if self._chooses:
                self._choose.run(stream, blocks, rows)
        self.edits.after(stream, inputs, rows, slot.index)

    def _draws(self, inputs: SamplingInputs) -> bool:
        """Whether a row has a temperature."""
        if inputs.temperature_N is self._greedy:  # as a rule the step before had the same ones
            return False
        draws = bool(inputs.temperature_N.any())
        if not draws:
            self._greedy = inputs.temperature_N
        return draws

    def _give(self, stream: Stream, inputs: SamplingInputs, rows: int, slot: Slot) -> None:
        """Bring parameters to the device: of the same arrays as before only the random numbers."""
        held, first = self._held, 0
        if held is not None and all(getattr(held, name) is getattr(inputs, name) for name in _FIELDS[:-1]):
            first = len(_FIELDS) - 1
        else:
            cuts = (inputs.top_p_N < 1) | ((inputs.top_k_N > 0) & (inputs.top_k_N < self._vocab))
            self._cuts = bool(cuts.any())
            self._chooses = self._cuts or bool(inputs.min_p_N.any())
        for i in range(first, len(_FIELDS)):
            slot.parameter_arrays[i][:rows] = getattr(inputs, _FIELDS[i]).view(np.int32)
        if not first:
            slot.parameter_arrays[0][rows:] = 0  # rows that a graph is padded with are greedy
        start = first * self._stride
        nbytes = len(_FIELDS) * self._stride - start
        stream.copy_in(self._given.address + start, slot.parameters.address + start, nbytes)
        self._held = inputs

    def close(self) -> None:
        self.edits.close()
        for kernel in (self._scan, self._histogram, self._choose):
            kernel.close()
        for memory in (*self._memory.values(), self._tokens, self._given):
            memory.close()
