"""Times the GPU's sampler: microseconds for rows of 128256 logits, by how they lie and what is asked.

    python benchmarks/h200_sampling.py [--dtype float32]

Logits are bfloat16, as networks of that type leave them, or float32, as edits do.
The launches of a step in a CUDA graph, the median of its replays; up to 64 rows the logits lie in L2, as a
step leaves them. The floor of 256 rows is one read at 4.3 TB/s: 15 us, of float32 31.
"""

from __future__ import annotations

import argparse
import ctypes as C
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np

from pelton.builder.cubins import Cubin, compile_kernel
from pelton.kernels.gpu.driver import Device, Event, Function, LaunchConfig, Memory, Stream, capture, launch
from pelton.kernels.sampling.cuda import LOGITS_KINDS, SamplerBytes, sampler_blocks, sampler_sources

VOCAB, MOST_ROWS = 128256, 256
ROWS = (1, 8, 64, 256)
#: (temperature, top_k, top_p, min_p)
ASKED = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (0.8, 0, 1.0, 0.0),
    "top-k 50": (0.8, 50, 1.0, 0.0),
    "top-p 0.9": (0.8, 0, 0.9, 0.0),
    "all": (0.8, 50, 0.9, 0.02),
}


def kinds() -> Iterator[tuple[str, np.ndarray]]:
    """Rows of logits that bfloat16 has: as of random weights; peaked ones; ranks by Zipf's law."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((MOST_ROWS, VOCAB), dtype=np.float32)
    yield "flat", bfloat16(normal)
    for width in (3, 6):
        rows = normal * np.float32(width)
        for _ in range(4):
            rows[np.arange(MOST_ROWS), rng.integers(0, VOCAB, MOST_ROWS)] += rng.uniform(8, 16)
        yield f"peaked, {width}", bfloat16(rows)
    ranks = np.argsort(normal, axis=1).astype(np.float32) + 1
    yield "zipf", bfloat16(np.float32(-1.1) * np.log(ranks) + np.float32(0.01) * normal)


def bfloat16(rows: np.ndarray) -> np.ndarray:
    """Cut to it, as float32."""
    return (rows.view(np.uint32) & 0xFFFF0000).view(np.float32)


class Bench:
    """Kernels on logits in device memory."""

    def __init__(self) -> None:
        self.device, self.stream = Device(), Stream()
        self._keep: list[Any] = []

    def put(self, array: np.ndarray) -> int:
        array = np.ascontiguousarray(array)
        memory = Memory(array.nbytes)
        self.stream.copy_in(memory.address, array.ctypes.data, array.nbytes)
        self.stream.wait()
        self._keep.append(memory)
        return memory.address

    def zeros(self, nbytes: int) -> int:
        memory = Memory(nbytes)
        memory.fill(0, self.stream)
        self._keep.append(memory)
        return memory.address

    def launcher(self, cubin: Cubin, addresses: list[int], grid: tuple[int, int]) -> Any:
        values = [C.c_uint64(a) for a in (*addresses, *[0] * cubin.scratch)]
        function, config = Function(cubin.image, cubin.name, cubin.shared), LaunchConfig()
        config.grid[:], config.block[:] = (*grid, 1), (cubin.threads, 1, 1)
        config.shared, config.stream = cubin.shared, self.stream.handle
        parameters = (C.c_void_p * len(values))(*map(C.addressof, values))
        self._keep.append((values, function))
        return lambda: launch(config, function.handle, parameters)

    def microseconds(self, launches: list[Any], times: int = 20) -> float:
        """Of one run of ``launches``."""
        with capture(self.stream) as captured:
            for _ in range(times):
                for one in launches:
                    one()
        begin, end = Event(timing=True), Event(timing=True)
        found = []
        for _ in range(7):
            begin.record(self.stream)
            captured.graph.launch(self.stream)
            end.record(self.stream)
            self.stream.wait()
            found.append(1000 * end.milliseconds_since(begin) / times)
        return statistics.median(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    dtype = parser.parse_args().dtype
    bench = Bench()
    cubins = {name: compile_kernel(s, bench.device.sm) for name, s in sampler_sources(VOCAB).items()}
    memory = {name: bench.zeros(MOST_ROWS * size) for name, size in vars(SamplerBytes.of(VOCAB)).items()}
    tokens = bench.zeros(4 * MOST_ROWS)
    uniform = bench.put(np.random.default_rng(1).random(MOST_ROWS, dtype=np.float32))
    for kind, logits in kinds():
        if dtype == "bfloat16":
            logits = (logits.view(np.uint32) >> 16).astype(np.uint16)
        at = bench.put(logits)
        for asked, (t, k, p, m) in ASKED.items():
            given = [
                bench.put(np.full(MOST_ROWS, x))
                for x in (np.float32(t), np.int32(k), np.float32(p), np.float32(m))
            ]
            shared = [at, LOGITS_KINDS[dtype], *given, uniform, memory["rows"], memory["pieces"]]
            found = []
            for rows in ROWS:
                grid = sampler_blocks(VOCAB, rows), rows
                works = [bench.launcher(cubins["scan"], [*shared, tokens, tokens], grid)]
                if k or p < 1:
                    works.append(bench.launcher(cubins["histogram"], [*shared, memory["bins"]], grid))
                    works.append(
                        bench.launcher(cubins["choose"], [*shared, memory["lists"], tokens, tokens], grid)
                    )
                found.append(bench.microseconds(works))
            print(f"| {kind} | {asked} | {' | '.join(f'{us:.1f}' for us in found)} |", flush=True)


if __name__ == "__main__":
    main()
