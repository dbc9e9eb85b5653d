"""A GPU that only moves bytes: the host's part of a GPU session, where there is none.

Memory is the host's, copies happen at once and kernels do nothing, so tests see what reaches the device
and ``benchmarks/gpu_host_time.py`` times the host alone. ``kernels`` gives kernels by name a body in Python.
"""

from __future__ import annotations

import contextlib
import ctypes as C
import mmap
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

from pelton.kernels.gpu import cublaslt, driver

#: A kernel's body: the addresses of its arguments, in order.
Body = Callable[[Any], None]
_ATTRIBUTES = {16: 132, 75: 9, 76: 0, 97: 232448}  # as an H200


class NullLibrary:
    """Stands for libcuda and libcublasLt; every function there is succeeds."""

    def __init__(self, kernels: Mapping[str, Body]) -> None:
        self._kernels = kernels
        self._memory: dict[int, tuple[mmap.mmap, Any]] = {}
        self._functions: dict[int, Body | None] = {}
        self.launches = 0
        self.grid = (0, 0, 0)
        """Of the launch whose body runs."""
        self.copies = 0
        self.copied_bytes = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cu"):
            raise AttributeError(name)
        function: Callable[..., int] = lambda *_: 0
        setattr(self, name, function)
        return function

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 1
        return 0

    def cuDeviceGetAttribute(self, value: Any, which: int, _device: int) -> int:
        value._obj.value = _ATTRIBUTES.get(which, 0)
        return 0

    def cuDeviceGetName(self, text: Any, _size: int, _device: int) -> int:
        text.value = b"null"
        return 0

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> int:
        free._obj.value = total._obj.value = 140 << 30
        return 0

    def cuMemAlloc_v2(self, pointer: Any, size: Any) -> int:
        block = mmap.mmap(-1, size.value)
        view = (C.c_ubyte * size.value).from_buffer(block)
        pointer._obj.value = C.addressof(view)
        self._memory[C.addressof(view)] = (block, view)
        return 0

    def cuMemHostAlloc(self, pointer: Any, size: Any, _flags: Any) -> int:
        return self.cuMemAlloc_v2(pointer, size)

    def cuMemFree_v2(self, address: Any) -> int:
        del self._memory[address.value]
        return 0

    def cuMemFreeHost(self, address: Any) -> int:
        return self.cuMemFree_v2(address)

    def cuMemcpyHtoDAsync_v2(self, target: Any, source: Any, size: Any, _stream: Any) -> int:
        C.memmove(target.value, source.value, size.value)
        self.copies += 1
        self.copied_bytes += size.value
        return 0

    def cuMemcpyDtoHAsync_v2(self, target: Any, source: Any, size: Any, _stream: Any) -> int:
        C.memmove(target.value, source.value, size.value)
        return 0

    def cuMemsetD8Async(self, target: Any, byte: Any, size: Any, _stream: Any) -> int:
        C.memset(target.value, byte.value, size.value)
        return 0

    def cuModuleGetFunction(self, handle: Any, _module: Any, name: bytes) -> int:
        handle._obj.value = len(self._functions) + 1
        self._functions[handle._obj.value] = self._kernels.get(name.decode())
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, _extra: Any) -> int:
        self.launches += 1
        body = self._functions[function.value]
        if body is not None:
            self.grid = tuple(config._obj.grid)
            body(parameters)
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments: Any) -> int:
        arguments[-1]._obj.value = 1
        return 0


@contextlib.contextmanager
def null_gpu(kernels: Mapping[str, Body] | None = None) -> Iterator[NullLibrary]:
    """While this is open, the process has a null GPU and no other."""
    null, functions = NullLibrary(kernels or {}), (driver.library, cublaslt.library)
    for function in functions:
        function.cache_clear()
    try:
        with mock.patch.object(C, "CDLL", return_value=null):
            for function in functions:
                function()
        yield null
    finally:
        for function in functions:
            function.cache_clear()
