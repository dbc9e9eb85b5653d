"""What a GPU itself can do: bytes and operations a second, measured in some hundred milliseconds.

The ceilings that profiles are compared with. Bytes: the copy engine's or the driver's copy of a buffer larger
than the L2 cache, read and written. Operations: a square product by cuBLASLt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pelton.kernels.gpu.cublaslt import CublasLt
from pelton.kernels.gpu.driver import Device, Event, Memory, Stream

_COPY_BYTES = 1 << 30
_SIDE = 8192
_REPEATS = 5
_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class GpuRates:
    """Best of several runs."""

    name: str
    memory: float
    """Bytes per second, read and written together."""
    dtype: str
    matrix: float
    """Operations per second of products of ``dtype``; a multiply-add is two."""


def measure(dtype: str, device: Device | None = None) -> GpuRates:
    """The rates of ``device`` (the first GPU). Raises ``ConfigError`` where its memory is taken."""
    device = device or Device()
    device.make_current()
    free = device.memory()[0]
    nbytes = min(_COPY_BYTES, free // 8)
    side = _SIDE
    while 3 * side * side * _ITEMSIZE[dtype] > free // 4:
        side //= 2
    return GpuRates(
        name=device.name,
        memory=2 * nbytes / _copy_seconds(nbytes),
        dtype=dtype,
        matrix=2 * side**3 / _product_seconds(side, dtype),
    )


def _copy_seconds(nbytes: int) -> float:
    stream, source, target = Stream(), Memory(nbytes), Memory(nbytes)
    source.fill(1, stream)
    try:
        return _best(stream, lambda: stream.copy(target.address, source.address, nbytes))
    finally:
        for part in (source, target, stream):
            part.close()


def _product_seconds(side: int, dtype: str) -> float:
    """Of random values: a GPU multiplies zeros faster than its power limit allows otherwise."""
    size = side * side * _ITEMSIZE[dtype]
    stream, cublas = Stream(), CublasLt()
    x, weight, out = (Memory(size) for _ in range(3))
    values = _random(side * side, dtype)
    for memory in (x, weight):
        stream.copy_in(memory.address, values.ctypes.data, size)
    stream.wait()
    try:
        return _best(
            stream,
            lambda: cublas.matmul(
                stream,
                tokens=side,
                n=side,
                k=side,
                x_row=side,
                dtype=dtype,
                out_dtype=dtype,
                x=x.address,
                weight=weight.address,
                out=out.address,
            ),
        )
    finally:
        for part in (x, weight, out, cublas, stream):
            part.close()


def _random(count: int, dtype: str) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
    values = np.random.default_rng(0).standard_normal(min(count, 1 << 20), dtype=np.float32)
    if dtype == "bfloat16":
        return np.resize((values.view(np.uint32) >> 16).astype(np.uint16), count)
    return np.resize(values.astype(dtype), count)


def _best(stream: Stream, work: Callable[[], None]) -> float:
    """Seconds of the fastest of several runs after one that warms up."""
    work()
    times = []
    for _ in range(_REPEATS):
        start, end = Event(timing=True), Event(timing=True)
        start.record(stream)
        work()
        end.record(stream)
        end.wait()
        times.append(end.milliseconds_since(start) / 1e3)
        start.close()
        end.close()
    return min(times)
