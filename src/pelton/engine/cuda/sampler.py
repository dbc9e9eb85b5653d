"""Sampling on the GPU: parameters in, tokens out, the step's logits stay where they are."""

from __future__ import annotations

import ctypes as C
from pathlib import Path

import numpy as np

from pelton.engine.batch_sampling import Int32, SamplingInputs
from pelton.engine.cuda.code import Code
from pelton.engine.shards import align
from pelton.kernels.gpu.driver import Event, Function, LaunchConfig, Memory, PinnedMemory, Stream, launch
from pelton.kernels.sampling.cuda import RESOLVE_BLOCK

_FIELDS = ("temperature_N", "top_k_N", "top_p_N", "min_p_N", "uniform_N")


class _Kernel:
    """One kernel of the engine with arguments by position."""

    def __init__(self, code: Code, index: int, root: Path, values: list[C._SimpleCData[int]]) -> None:
        kernel = code.kernels[index]
        self._function = Function((root / kernel.file).read_bytes(), kernel.name, kernel.shared)
        self._values = [*values, *(C.c_uint64(0) for _ in range(kernel.scratch))]
        self._parameters = (C.c_void_p * len(self._values))(*map(C.addressof, self._values))
        self._config = LaunchConfig()
        self._config.block[:] = (kernel.threads, 1, 1)
        self._config.shared = kernel.shared

    def run(self, stream: Stream, programs: int) -> None:
        self._config.grid[:] = (programs, 1, 1)
        self._config.stream = stream.handle
        launch(self._config, self._function.handle, self._parameters)

    def close(self) -> None:
        self._function.close()


class Slot:
    """Pinned memory for one step in flight: what the GPU reads and writes by itself."""

    def __init__(self, rows: int, input_bytes: int) -> None:
        self.inputs = PinnedMemory(input_bytes)
        self.parameters = PinnedMemory(len(_FIELDS) * align(4 * rows))
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


class DeviceSampler:
    """Takes tokens from ``logits`` (an address), at most ``rows`` a step."""

    def __init__(self, code: Code, root: Path, rows: int, logits: int, ids: int) -> None:
        self._stride = align(4 * rows)
        self._parameters = Memory(len(_FIELDS) * self._stride)
        self._tokens = Memory(4 * rows)
        places = [self._parameters.address + i * self._stride for i in range(len(_FIELDS))]
        arguments = [logits, *places, self._tokens.address]
        self._sample = _Kernel(code, code.sampler, root, [C.c_uint64(a) for a in arguments])
        self._count = C.c_int32()
        known = [C.c_uint64(ids), C.c_uint64(self._tokens.address), self._count]
        self._resolve = _Kernel(code, code.resolve, root, known)

    def resolve(self, stream: Stream, tokens: int) -> None:
        """Replace placeholders in the step's ids by what the step before has sampled."""
        self._count.value = tokens
        self._resolve.run(stream, -(-tokens // RESOLVE_BLOCK))

    def sample(self, stream: Stream, inputs: SamplingInputs, rows: int, slot: Slot) -> None:
        """Sample ``rows`` rows; their tokens arrive in ``slot``."""
        staged = slot.parameters.array(np.uint8)
        for i, name in enumerate(_FIELDS):
            values = getattr(inputs, name)
            staged[i * self._stride : i * self._stride + 4 * rows] = values.view(np.uint8)
        stream.copy_in(self._parameters.address, slot.parameters.address, len(_FIELDS) * self._stride)
        self._sample.run(stream, rows)
        stream.copy_out(slot.tokens.address, self._tokens.address, 4 * rows)

    def close(self) -> None:
        for part in (self._sample, self._resolve, self._parameters, self._tokens):
            part.close()
