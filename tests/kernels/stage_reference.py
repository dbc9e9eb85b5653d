"""What ``kernels.stage`` does, in numpy; the kernel beside it, on a GPU or emulated (``cuda_on_cpu.h``)."""

from __future__ import annotations

import ctypes as C
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pelton.kernels.launch import LaunchSpec
from pelton.kernels.stage.cuda import HEADER, Segments, stage_programs, stage_source

ON_CPU = """
extern "C" int run(int blocks, SIGNATURE) {
    cpu::grid = {blocks, 1, 1};
    for (int i = 0; i < blocks; ++i) {
        cpu::first = i;
        if (!cpu::run(1, THREADS, 0, 0, 0, [&] { CALL; })) return 1;
    }
    return 0;
}
"""
#: packed, inputs, sampled, values, token ids, segments.
Kernel = Callable[[int, np.ndarray, np.ndarray, np.ndarray, int, int, Segments], None]


def stage_reference(
    packed: np.ndarray, inputs: np.ndarray, sampled: np.ndarray, n: int, ids: int, segments: Segments
) -> None:
    """Fill ``inputs`` from ``packed``; all int32."""
    starts, shifts = np.array(segments.starts), np.array(segments.shifts)
    values = packed[HEADER : HEADER + n].copy()
    waits = np.flatnonzero(values[:ids] < 0)
    values[waits] = np.maximum(sampled[-values[waits] - 1], 0)
    for i in range(n):
        inputs[i + shifts[np.flatnonzero(starts <= i)[-1]]] = values[i]
    rest = packed[HEADER + n :][: 2 * packed[0]]
    inputs[rest[0::2]] = rest[1::2]


def on_cpu() -> Kernel:
    from tests.kernels.cuda_on_cpu import library

    with tempfile.TemporaryDirectory() as folder:
        run = library(LaunchSpec(stage_source(), (), ()), ON_CPU, Path(folder)).run
    run.argtypes = (C.c_int, *(C.c_void_p,) * 3, C.c_int, C.c_int, Segments)

    def kernel(blocks: int, *given: Any) -> None:
        arrays = [array.ctypes.data for array in given[:3]]
        assert run(blocks, *arrays, *given[3:]) == 0

    return kernel


def on_gpu() -> Kernel:
    """``packed`` lies in page-locked memory, as in a step."""
    from pelton.builder.cubins import compile_kernel
    from pelton.kernels.gpu.driver import Device, Function, LaunchConfig, Memory, PinnedMemory, Stream, launch

    device, stream = Device(), Stream()
    cubin = compile_kernel(stage_source(), device.sm)
    function = Function(cubin.image, cubin.name, cubin.shared)

    def kernel(blocks: int, packed: np.ndarray, *given: Any) -> None:
        device.make_current()
        host, memory = PinnedMemory(packed.nbytes), [Memory(a.nbytes) for a in given[:2]]
        host.array(np.int32)[:] = packed
        for array, there in zip(given[:2], memory, strict=True):
            stream.copy_in(there.address, array.ctypes.data, array.nbytes)
        config = LaunchConfig()
        config.grid[:], config.block[:] = (blocks, 1, 1), (cubin.threads, 1, 1)
        config.stream = stream.handle
        addresses = [C.c_uint64(m.address) for m in (host, *memory)]
        values = [*addresses, *map(C.c_int32, given[2:4]), given[4]]
        assert function.parameter_sizes() in (None, list(map(C.sizeof, values)))
        launch(config, function.handle, (C.c_void_p * len(values))(*map(C.addressof, values)))
        stream.copy_out(given[0].ctypes.data, memory[0].address, given[0].nbytes)
        stream.wait()
        for each in (host, *memory):
            each.close()

    return kernel


def steps() -> Iterator[tuple[np.ndarray, np.ndarray, int, int, int, Segments]]:
    """packed, room for inputs, values, token ids, pairs, segments."""
    rng = np.random.default_rng(0)
    for lengths, pairs in (
        ([1, 1, 1, 2, 1, 1], 0),
        ([7, 7, 7, 0, 4, 3, 3], 0),
        ([900, 900, 900, 40, 39, 39], 700),
        ([1, 1, 1, 2, 1, 1], 3),
        ([40, 40, 40, 41, 40, 40], 20000),
    ):
        room = [n + int(rng.integers(0, 90)) for n in lengths]
        n = sum(lengths)
        segments = Segments()
        segments.starts[:] = [np.iinfo(np.int32).max] * len(segments.starts)
        segments.starts[: len(lengths)] = starts = np.cumsum([0, *lengths[:-1]]).tolist()
        segments.shifts[: len(lengths)] = (np.cumsum([0, *room[:-1]]) - starts).tolist()
        packed = rng.integers(-9, 99, HEADER + n + 2 * pairs).astype(np.int32)
        packed[0], table = pairs, sum(room)
        packed[HEADER + n :: 2] = table + rng.permutation(max(1, pairs))[:pairs]
        yield packed, np.full(table + pairs + 5, -5, np.int32), n, lengths[0], pairs, segments


def stage_cases(kernel: Kernel) -> int:
    """Run it on random steps and compare; -> how many."""
    sampled = np.random.default_rng(1).integers(100, 200, 9).astype(np.int32)
    sampled[4] = -1  # nothing could be sampled
    count = 0
    for packed, got, n, ids, pairs, segments in steps():
        want = got.copy()
        kernel(stage_programs(n, pairs), packed, got, sampled, n, ids, segments)
        stage_reference(packed, want, sampled, n, ids, segments)
        np.testing.assert_array_equal(got, want, err_msg=str(count))
        count += 1
    return count
