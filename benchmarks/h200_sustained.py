"""What a GPU gives when large products go on for seconds: operations a second beside its clock and power.

    python benchmarks/h200_sustained.py [--tokens 2048,8192] [--loads cublaslt,zeros,prefill] [--seconds 3]

Of Llama-3.1-8B's shape, bfloat16: gate and up by cuBLASLt with random weights and inputs, and with zeros,
which cost less power; the same and its activation by ``hopper_products.cu`` (``tiles``); all products of a
prefill's layers with norms, activations and residuals, as an engine launches them (``prefill``) and with
cuBLASLt throughout (``prefill-cublaslt``). Graphs of some milliseconds one behind the other, after some rest.
Over time: TFLOP/s, the multiprocessors' clock (their own counter beside the GPU's nanoseconds), the share of
what the tensor cores do at that clock, the board's power and why its clock is as it is (NVML, every 100 ms).
"""

from __future__ import annotations

import argparse
import ctypes as C
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from h200_chain import STEP, Chain, Chosen, Op, call_of, chosen, rows_of
from h200_kernels import Bench, compile_or_none

from pelton.engine.resources import cores
from pelton.ir.tensors import f32_to_bf16
from pelton.kernels.gpu import nvrtc
from pelton.kernels.gpu.driver import Event, Function, Graph, LaunchConfig, capture, launch
from pelton.kernels.launch import LaunchSpec
from pelton.kernels.linear.hopper_products import many_tiles, products
from pelton.kernels.linear.products import Form, cublaslt
from pelton.kernels.linear.tiles import PROCESSORS
from pelton.kernels.tactic import Tactic, all_tactics

GATE_UP = STEP[2]
LAYERS = 8  # of different weights
#: Operations of a multiprocessor's tensor cores a cycle, of bfloat16.
PER_CYCLE = 4096
#: Where windows of time end, seconds.
ENDS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
#: Bits of NVML's clock event reasons.
REASONS = {0x4: "power cap", 0x8: "slowdown", 0x20: "thermal", 0x40: "hw thermal", 0x80: "power brake"}


class Nvml:
    """The first GPU's power, clock and reasons, read every 100 ms while it is entered."""

    def __init__(self) -> None:
        self._lib = C.CDLL("libnvidia-ml.so.1")
        self._handle = C.c_void_p()
        assert self._lib.nvmlInit_v2() == 0
        assert self._lib.nvmlDeviceGetHandleByIndex_v2(0, C.byref(self._handle)) == 0
        self.samples: list[tuple[float, float, int, int]] = []
        """(Time, W, MHz, reasons)."""

    def __enter__(self) -> Nvml:
        self.samples, self._ends = [], threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        energy, clock, reasons = C.c_uint64(), C.c_uint(), C.c_uint64()
        before = None
        while not self._ends.wait(0.1):
            self._lib.nvmlDeviceGetTotalEnergyConsumption(self._handle, C.byref(energy))
            self._lib.nvmlDeviceGetClockInfo(self._handle, 1, C.byref(clock))
            self._lib.nvmlDeviceGetCurrentClocksEventReasons(self._handle, C.byref(reasons))
            now = time.perf_counter()
            if before is not None:
                watts = 1e-3 * (energy.value - before[1]) / (now - before[0])
                self.samples.append((now, watts, clock.value, reasons.value))
            before = now, energy.value


class Clocks:
    """The multiprocessors' own counters, read between launches."""

    def __init__(self, bench: Bench, most: int = 4096) -> None:
        file = str(Path(__file__).with_name("h200_clock.cu"))
        shared = 200 << 10  # one a multiprocessor
        self._function = Function(nvrtc.compile_file(file, "sm_90a", ()), "clocks", shared)
        self._bench, self._most, self._taken = bench, most, 0
        self._at = bench.small.address + bench.small.nbytes - most * PROCESSORS * 16
        self._config = LaunchConfig()
        self._config.grid[:], self._config.block[:] = [PROCESSORS, 1, 1], [32, 1, 1]
        self._config.shared, self._config.stream = shared, bench.stream.handle

    def read(self) -> None:
        place = C.c_uint64(self._at + self._taken * PROCESSORS * 16)
        self._taken = (self._taken + 1) % self._most
        launch(self._config, self._function.handle, (C.c_void_p * 1)(C.addressof(place)))

    def taken(self) -> Any:
        """(Cycles, nanoseconds) of one multiprocessor, of all readings since the last call."""
        found = np.empty((self._taken, PROCESSORS, 2), np.uint64)
        self._bench.stream.copy_out(found.ctypes.data, self._at, found.nbytes)
        self._bench.stream.wait()
        self._taken = 0
        return found[:, 0].astype(np.float64)


class Prefill(Chain):
    """Layers of a prefill: without attention and head."""

    def step(self) -> list[Any]:
        launches: list[Any] = []
        at, small = self._bench.big.address, self._bench.small.address
        x, y, wide, gain = (small + (i << 20) for i in (0, 128, 256, 640))
        for _ in range(LAYERS if self._tokens <= 4096 else LAYERS // 4):
            for op, source, residual, target in (
                (STEP[0], x, gain, wide),
                (STEP[1], wide, x, y),
                (STEP[2], y, gain, wide),
                (STEP[3], wide, y, x),
            ):
                launches += self._bound(op, [source, at, 0, residual], target)
                at += self._products[op].weight_bytes
        return launches


@dataclass(frozen=True)
class Load:
    """What goes on."""

    name: str
    tokens: int
    products: dict[Op, Chosen]
    zeros: bool = False

    @property
    def sources(self) -> list[Any]:
        return [w.kernel for p in self.products.values() for w in p.works if isinstance(w, LaunchSpec)]

    def graph(self, bench: Bench) -> tuple[Graph, float]:
        """And its operations."""
        chain = Prefill(bench, self.tokens, self.products)
        if len(self.products) > 1:
            launches = chain.step()
            layers = LAYERS if self.tokens <= 4096 else LAYERS // 4
        else:
            layers = LAYERS if self.tokens <= 4096 else LAYERS // 2
            small = bench.small.address
            launches = []
            for i in range(layers):
                weight = bench.big.address + i * self.products[GATE_UP].weight_bytes
                launches += chain._bound(GATE_UP, [small, weight, 0, small], small + (256 << 20))
        for one in launches[:8]:
            one()  # algorithms are searched for once
        bench.stream.wait()
        with capture(bench.stream) as captured:
            for one in launches:
                one()
        assert captured.graph is not None
        return captured.graph, 2.0 * self.tokens * layers * sum(rows_of(op) * op[2] for op in self.products)


def with_cublaslt(op: Op, tokens: int) -> Chosen:
    tactic: Tactic = all_tactics()[f"cuda.{op[0]}.cublaslt"]
    assert tactic.launches is not None
    works = tactic.launches(call_of(op, "bfloat16"), tokens)
    return Chosen(tactic, works, 2 * rows_of(op) * op[2])


def load_of(kind: str, tokens: int) -> Load:
    call = call_of(GATE_UP, "bfloat16")
    alone = with_cublaslt(GATE_UP, tokens)
    tactic, nbytes = alone.tactic, alone.weight_bytes
    # Neither norm nor activation.
    bare = Chosen(tactic, cublaslt(Form(), call, tokens), nbytes)
    match kind:
        case "cublaslt":
            return Load("gate and up, cuBLASLt", tokens, {GATE_UP: bare})
        case "zeros":
            return Load("gate and up, cuBLASLt, zeros", tokens, {GATE_UP: bare}, zeros=True)
        case "tiles":
            ours = Chosen(
                tactic, products(Form(gated=True), call, many_tiles(2 * GATE_UP[1], 0), tokens), nbytes
            )
            return Load("gate, up and activation, hopper_products.cu", tokens, {GATE_UP: ours})
        case "prefill-cublaslt":
            found = {op: with_cublaslt(op, tokens) for op in STEP}
            return Load("a prefill's products, cuBLASLt", tokens, found)
        case "prefill":
            found = {op: chosen(op, tokens, "bfloat16", "float32") for op in STEP}
            return Load("a prefill's products", tokens, found)
    raise SystemExit(f"there is no load {kind!r}")


def fill(bench: Bench, zeros: bool) -> None:
    """Weights around 0.02, inputs around 1."""
    rng = np.random.default_rng(0)
    for memory, scale in ((bench.big, 0.02), (bench.small, 1.0)):
        values = f32_to_bf16(rng.standard_normal(1 << 24, dtype=np.float32) * np.float32(scale))
        if zeros:
            values[:] = 0
        for offset in range(0, memory.nbytes, values.nbytes):
            nbytes = min(values.nbytes, memory.nbytes - offset)
            bench.stream.copy_in(memory.address + offset, values.ctypes.data, nbytes)
    bench.stream.wait()


@dataclass(frozen=True)
class Window:
    """Of time."""

    end: float
    rate: float
    mhz: float

    def __str__(self) -> str:
        share = self.rate / (PER_CYCLE * PROCESSORS * self.mhz * 1e6)
        rate = f"{self.rate / 1e12:6.0f} TFLOP/s at {self.mhz:5.0f} MHz"
        return f"to {self.end:5.2f} s {rate} {share:4.0%} of its peak"


def run(bench: Bench, clocks: Clocks, graph: Graph, operations: float, seconds: float) -> list[Window]:
    """The graph again and again."""
    events: list[Event] = []
    clocks.read()
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        graph.launch(bench.stream)
        clocks.read()
        events.append(Event())
        events[-1].record(bench.stream)
        if len(events) > 2:
            events[-3].wait()
    bench.stream.wait()
    cycles, times = clocks.taken().T
    times -= times[0]
    windows, begin = [], 0
    for limit in (e for e in (*ENDS, seconds) if e <= seconds):
        end = int(np.searchsorted(times, 1e9 * limit, side="right")) - 1
        if end > begin:
            duration = 1e-9 * (times[end] - times[begin])
            rate = operations * (end - begin) / duration
            mhz = 1e-6 * (cycles[end] - cycles[begin]) / duration
            windows.append(Window(limit, rate, mhz))
            begin = end
    return windows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="2048,8192")
    parser.add_argument("--loads", default="cublaslt,tiles,prefill-cublaslt,prefill,zeros")
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    wanted = [load_of(k, int(t)) for t in args.tokens.split(",") for k in args.loads.split(",")]
    wanted.sort(key=lambda load: load.zeros)
    sources = list(dict.fromkeys(s for load in wanted for s in load.sources))
    with ProcessPoolExecutor(cores()) as pool:  # forked before anything here has a thread or a context
        cubins = dict(zip(sources, pool.map(compile_or_none, sources), strict=True))
    bench = Bench({s: c for s, c in cubins.items() if c is not None}, big_bytes=4 << 30)
    bench.overlap = True
    nvml, clocks, zeros = Nvml(), Clocks(bench), None
    for load in wanted:
        if zeros != load.zeros:
            fill(bench, zeros := load.zeros)
        graph, operations = load.graph(bench)
        time.sleep(0.7)
        with nvml:
            windows = run(bench, clocks, graph, operations, args.seconds)
        print(f"{load.name}, {load.tokens} tokens", flush=True)
        print("\n".join(f"  {window}" for window in windows))
        for now, watts, mhz, reasons in nvml.samples[:: max(1, len(nvml.samples) // 6)]:
            why = ", ".join(name for bit, name in REASONS.items() if reasons & bit)
            print(f"    NVML {now - nvml.samples[0][0]:5.1f} s {watts:4.0f} W {mhz} MHz {why}")
        half = nvml.samples[len(nvml.samples) // 2 :]
        watts = sum(s[1] for s in half) / len(half)
        print(f"  second half: {watts:.0f} W, {1e12 * watts / windows[-1].rate:.3f} J a TFLOP", flush=True)
        graph.close()


if __name__ == "__main__":
    main()
