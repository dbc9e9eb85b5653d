"""Runs the GPU sampler's kernels, on a GPU or emulated (``cuda_on_cpu.h``), beside ``reference``."""

from __future__ import annotations

import ctypes as C
import functools
import importlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from tests.kernels.cuda_on_cpu import compiled

from pelton.kernels.gpu import nvrtc
from pelton.kernels.launch import KernelSource
from pelton.kernels.sampling import reference
from pelton.kernels.sampling.cuda import LOGITS_KINDS, SamplerBytes, sampler_blocks, sampler_sources

FIELDS = ("temperature", "top_k", "top_p", "min_p", "uniform")
#: Parameters of each kernel.
SHARED = ("logits", "kind", *FIELDS, "rows", "pieces")
KERNELS = {
    "scan": (*SHARED, "tokens", "tokens_host"),
    "histogram": (*SHARED, "bins"),
    "choose": (*SHARED, "lists", "tokens", "tokens_host"),
}
ON_CPU = """
template <class F> int run(int blocks, int rows, F body) {
    cpu::grid = {blocks, rows, 1};
    for (int n = 0; n < rows; ++n)
        for (int i = 0; i < blocks; ++i) {
            cpu::first = blocks - 1 - i;  // in an order of its own
            if (!cpu::run(1, THREADS, 0, n, 0, body)) return 1;
        }
    return 0;
}
"""


def launch(source: KernelSource, grid: tuple[int, ...], tensors: dict[str, Any]) -> None:
    kernel = getattr(importlib.import_module(source.module), source.function)
    arguments = [tensors[name] for name, _ in source.types]
    kernel[grid](*arguments, **dict(source.constants), num_warps=source.num_warps)


class OnCpu:
    """The kernels as C++, every thread a fiber."""

    def __init__(self, vocab: int) -> None:
        source = sampler_sources(vocab)["scan"]
        text = f'#include "cuda_on_cpu.h"\n{(nvrtc.KERNELS / source.file).read_text()}{ON_CPU}'
        for name, parameters in KERNELS.items():
            given = ", ".join("int kind" if p == "kind" else f"void* {p}" for p in parameters)
            casts = ", ".join(p if p == "kind" else f"any({p})" for p in parameters)
            text += (
                f'extern "C" int run_{name}(int blocks, int n, {given}) '
                f"{{ return run(blocks, n, [&] {{ {name}({casts}); }}); }}\n"
            )
        text = text.replace("template <class F> int run", ANY + "template <class F> int run", 1)
        included = (nvrtc.KERNELS / source.file).parent
        with tempfile.TemporaryDirectory() as folder:
            self._library = compiled(text, dict(source.constants), Path(folder), included)

    def __call__(self, blocks: int, kind: int, arrays: dict[str, np.ndarray]) -> None:
        n = len(arrays["tokens"])
        for name, parameters in KERNELS.items():
            addresses = [kind if p == "kind" else C.c_void_p(arrays[p].ctypes.data) for p in parameters]
            assert getattr(self._library, f"run_{name}")(blocks, n, *addresses) == 0, "threads wait for ever"


#: A pointer that becomes what a parameter wants.
ANY = """
struct Any {
    void* pointer;
    template <class T> operator T*() const { return (T*)pointer; }
};
inline Any any(void* pointer) { return {pointer}; }
"""


class OnGpu:
    def __init__(self, vocab: int) -> None:
        from pelton.builder.cubins import compile_kernel
        from pelton.kernels.gpu.driver import Device, Function, Stream

        self._device = Device()
        self._stream = Stream()
        self._functions = {}
        for name, source in sampler_sources(vocab).items():
            cubin = compile_kernel(source, self._device.sm)
            self._functions[name] = Function(cubin.image, cubin.name, cubin.shared), cubin.threads

    def __call__(self, blocks: int, kind: int, arrays: dict[str, np.ndarray]) -> None:
        from pelton.kernels.gpu.driver import LaunchConfig, Memory
        from pelton.kernels.gpu.driver import launch as launch_on_gpu

        self._device.make_current()
        memory = {name: Memory(array.nbytes) for name, array in arrays.items()}
        for name, array in arrays.items():
            self._stream.copy_in(memory[name].address, array.ctypes.data, array.nbytes)
        for name, parameters in KERNELS.items():
            function, threads = self._functions[name]
            config = LaunchConfig()
            config.grid[:], config.block[:] = (blocks, len(arrays["tokens"]), 1), (threads, 1, 1)
            config.stream = self._stream.handle
            values: list[Any] = [
                C.c_int32(kind) if p == "kind" else C.c_uint64(memory[p].address) for p in parameters
            ]
            launch_on_gpu(config, function.handle, (C.c_void_p * len(values))(*map(C.addressof, values)))
        for name, array in arrays.items():
            self._stream.copy_out(array.ctypes.data, memory[name].address, array.nbytes)
        self._stream.wait()
        for each in memory.values():
            each.close()


@functools.cache
def runner(device: str, vocab: int) -> Any:
    return OnGpu(vocab) if device == "cuda" else OnCpu(vocab)


def sample(logits: np.ndarray, device: str, blocks: int = 0, **params: np.ndarray) -> np.ndarray:
    """Tokens of each row, by ``temperature``, ``top_k``, ``top_p``, ``min_p`` and ``uniform`` (N,).

    ``logits``: float32, float16, or uint16: bfloat16's bits.
    """
    n, vocab = logits.shape
    arrays = {"logits": np.ascontiguousarray(logits), **params}
    for name, size in vars(SamplerBytes.of(vocab)).items():
        arrays[name] = np.full((n, size), 0 if name in ("rows", "bins") else 0xA5, np.uint8)
    arrays |= {name: np.full(n, -7, np.int32) for name in ("tokens", "tokens_host")}
    kind = LOGITS_KINDS["bfloat16" if logits.dtype == np.uint16 else str(logits.dtype)]
    runner(device, vocab)(blocks or sampler_blocks(vocab, n), kind, arrays)
    assert np.array_equal(arrays["tokens"], arrays["tokens_host"])
    assert not arrays["bins"].any(), "the next step's counts begin at zero"
    return arrays["tokens"]


#: (name, temperature, top_k, top_p, min_p)
PARAMETERS = [
    ("greedy", 0.0, 0, 1.0, 0.0),
    ("temperature", 0.8, 0, 1.0, 0.0),
    ("hot", 3.0, 0, 1.0, 0.0),
    ("top_k", 1.0, 7, 1.0, 0.0),
    ("top_k of all", 1.0, 100000, 1.0, 0.0),
    ("top_p", 0.7, 0, 0.9, 0.0),
    ("small top_p", 1.0, 0, 0.01, 0.0),
    ("large top_p", 2.0, 0, 0.9999, 0.0),
    ("min_p", 1.0, 0, 1.0, 0.1),
    ("all", 1.3, 40, 0.8, 0.02),
    ("many of top_k", 0.9, 3000, 0.95, 0.0),
    ("cold", 1e-3, 0, 0.9, 0.0),
]


def logits_of(kind: str, n: int, vocab: int) -> np.ndarray:
    """Rows as models give them (``peaked``), flat ones, many equal ones, few that are allowed.

    ``crowded``: all but one in so small a range that a list has no room for those around the cut.
    """
    rng = np.random.default_rng(len(kind) * 1000 + vocab)
    normal = rng.standard_normal((n, vocab), dtype=np.float32)
    if kind == "flat":
        return normal * np.float32(0.5)
    if kind == "ties":
        return np.round(normal * 2).astype(np.float32)
    if kind == "crowded":
        rows = normal * np.float32(1e-4)
        rows[np.arange(n), rng.integers(0, vocab, n)] += 4
        return rows
    if kind == "masked":
        return np.where(rng.random((n, vocab)) < 20 / vocab, normal * 3, -np.inf).astype(np.float32)
    rows = normal * np.float32(3)
    rows[np.arange(n), rng.integers(0, vocab, n)] += 9
    return rows


KINDS = ("peaked", "flat", "ties", "masked", "crowded")


def check(device: str, vocab: int, kinds: tuple[str, ...] = KINDS, n: int = 6) -> int:
    """Compare with ``reference``; a token may differ only where the draw lies at a boundary of its range."""
    checked = 0
    for kind in kinds:
        logits = logits_of(kind, n, vocab)
        for name, t, k, p, m in PARAMETERS:
            seeds, positions = np.arange(n, dtype=np.uint64), np.arange(n, dtype=np.int64) * 3
            u = reference.uniforms(seeds, positions)
            got = sample(
                logits,
                device,
                temperature=np.full(n, t, np.float32),
                top_k=np.full(n, k, np.int32),
                top_p=np.full(n, p, np.float32),
                min_p=np.full(n, m, np.float32),
                uniform=u.astype(np.float32),
            )
            want, _ = reference.sample(
                logits, [t] * n, [k] * n, [p] * n, [m] * n, seeds, positions, want_logprobs=False
            )
            for i in range(n):
                if got[i] != want[i] and t > 0:
                    limits = k, float(np.float32(p)), float(np.float32(m))
                    near = {
                        reference._choose(logits[i], np.float32(t), *limits, float(np.clip(u[i] + d, 0, 1)))
                        for d in (-2e-5, 2e-5)
                    }
                    assert got[i] in near, (kind, name, i, int(got[i]), int(want[i]))
                else:
                    assert got[i] == want[i], (kind, name, i, int(got[i]), int(want[i]))
                checked += 1
    broken = logits_of("peaked", 4, vocab)
    broken[0, 3], broken[1, vocab - 1], broken[2] = np.nan, np.inf, -np.inf
    ones = np.ones(4, np.float32)
    got = sample(broken, device, temperature=ones, top_k=np.zeros(4, np.int32), top_p=ones * 0.9,
                 min_p=ones * 0, uniform=ones * 0.5)  # fmt: skip
    assert got[:3].tolist() == [-1, -1, -2]
    assert got[3] >= 0
    return checked


def check_types(device: str, vocab: int) -> None:
    """Rows of bfloat16 and float16 give the tokens of the same numbers in float32."""
    n = 4
    ones = np.ones(n, np.float32)
    given = {
        "temperature": np.array([0, 0.8, 0.8, 1.2], np.float32),
        "top_k": np.array([0, 0, 40, 0], np.int32),
        "top_p": np.array([1, 1, 1, 0.8], np.float32),
        "min_p": 0 * ones,
        "uniform": np.array([0.5, 0.3, 0.6, 0.9], np.float32),
    }
    exact = logits_of("flat", n, vocab) * np.float32(2)
    bits = (exact.view(np.uint32) >> 16).astype(np.uint16)
    halves = exact.astype(np.float16)
    for short, same in ((bits, (bits.astype(np.uint32) << 16).view(np.float32)), (halves, halves)):
        want = sample(same.astype(np.float32), device, **given)
        assert sample(short, device, **given).tolist() == want.tolist()
