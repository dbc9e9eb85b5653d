"""The CUDA driver API, as much of it as an engine needs, through ctypes.

Every call that fails raises ``DeviceError`` with the driver's own words. One context a process and device:
the primary one, which PyTorch uses too.
"""

from __future__ import annotations

import ctypes as C
import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from pelton.errors import ConfigError, DeviceError, EngineError, MissingDependencyError
from pelton.kernels.gpu.taken import note

#: CUdevice_attribute
_SM_COUNT, _MAJOR, _MINOR, _MAX_SHARED = 16, 75, 76, 97
#: CUfunction_attribute
_FUNC_MAX_DYNAMIC_SHARED = 8
#: Shared memory that needs no opt-in, bytes.
_SHARED_DEFAULT = 48 * 1024
_STREAM_NON_BLOCKING = 1
_OUT_OF_MEMORY = 2
#: No kernel of ours has as many.
_MAX_PARAMETERS = 256
#: CUresults after which a context is of no more use: memory errors, and faults of a kernel (illegal address,
#: misaligned address, illegal instruction, assertion, time limit, ...).
_FATAL = frozenset({214, 219, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999})
_CAPTURE_THREAD_LOCAL = 1
_EVENT_DISABLE_TIMING = 2
_EVENT_RECORD_EXTERNAL = 1
#: CUlaunchAttributeID: programmatic stream serialization (dependent launch)
_PROGRAMMATIC = 6


class LaunchAttribute(C.Structure):
    """CUlaunchAttribute: an id and a union of 64 bytes."""

    _fields_ = (("id", C.c_int), ("pad", C.c_int), ("value", C.c_int * 16))


class LaunchConfig(C.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", C.c_uint * 3),
        ("block", C.c_uint * 3),
        ("shared", C.c_uint),
        ("stream", C.c_void_p),
        ("attributes", C.POINTER(LaunchAttribute)),
        ("n_attributes", C.c_uint),
    )


def dependent_launch() -> LaunchAttribute:
    """The attribute of a kernel that may begin before the one ahead of it in the stream has ended."""
    attribute = LaunchAttribute()
    attribute.id = _PROGRAMMATIC
    attribute.value[0] = 1
    return attribute


@functools.cache
def library() -> Any:
    """libcuda, initialised. Raises ``MissingDependencyError`` where there is no driver or no GPU."""
    try:
        lib = C.CDLL("libcuda.so.1")
    except OSError as error:
        raise MissingDependencyError(
            f"there is no NVIDIA driver here ({error}); run the engine on a machine with an NVIDIA GPU, or "
            "build it for the CPU"
        ) from error
    code = lib.cuInit(0)
    if code:
        raise MissingDependencyError(
            f"the NVIDIA driver does not start: {_words(lib, code)}; is there a GPU, and may this process "
            "use it?"
        )
    return lib


def _words(lib: Any, code: int) -> str:
    text = C.c_char_p()
    lib.cuGetErrorString(code, C.byref(text))
    return (text.value or b"unknown error").decode()


def call(name: str, *args: Any) -> None:
    """Call ``name`` of the driver API; raises ``DeviceError`` when it fails."""
    code = getattr(library(), name)(*args)
    if code:
        raise _failure(name, code)


def _failure(name: str, code: int) -> DeviceError:
    words = _words(library(), code)
    if code == _OUT_OF_MEMORY:
        return DeviceError(
            f"the GPU has no memory left ({name}); use a smaller gpu_memory_fraction or max_batch_size, or "
            "end what else uses the GPU"
        )
    return DeviceError(f"the GPU failed ({name}): {words}; restart to use it again")


def launch(config: LaunchConfig, function: C.c_void_p, parameters: Any) -> None:
    """Put a kernel into its stream.

    Raises ``EngineError`` where the GPU cannot run it, ``DeviceError`` where an earlier one has failed.
    """
    code = library().cuLaunchKernelEx(C.byref(config), function, parameters, None)
    if code in _FATAL:
        raise _failure("cuLaunchKernelEx", code)
    if code:
        raise EngineError(
            f"the GPU refuses a launch: {_words(library(), code)}; grid {list(config.grid)}, "
            f"{config.block[0]} threads, {config.shared} bytes of shared memory"
        )


def check_context() -> None:
    """Raise ``DeviceError`` where the GPU has failed; cheap, waits for nothing."""
    free, total = C.c_size_t(), C.c_size_t()
    call("cuMemGetInfo_v2", C.byref(free), C.byref(total))


def release(name: str, *args: Any) -> None:
    """Give something back. Where the GPU has failed it is gone already, and nothing is raised."""
    code = getattr(library(), name)(*args)
    if code and code not in _FATAL:
        raise _failure(name, code)


def driver_version() -> str:
    """The newest CUDA version that the driver knows, such as 13.0."""
    version = C.c_int()
    call("cuDriverGetVersion", C.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def address(value: int) -> C.c_uint64:
    """A device address as an argument."""
    return C.c_uint64(value)


class Device:
    """A GPU and its primary context, current in the calling thread.

    ``name``; ``sm``: compute capability, 90 for Hopper; ``sm_count``; ``total_memory`` bytes.
    """

    def __init__(self, index: int = 0) -> None:
        count = C.c_int()
        call("cuDeviceGetCount", C.byref(count))
        if index >= count.value:
            raise EngineError(f"there is no GPU {index}: this machine has {count.value}")
        device = C.c_int()
        call("cuDeviceGet", C.byref(device), index)
        self._device = device.value
        context = C.c_void_p()
        call("cuDevicePrimaryCtxRetain", C.byref(context), self._device)
        self._context = context
        self.make_current()
        text = C.create_string_buffer(200)
        call("cuDeviceGetName", text, len(text), self._device)
        self.name = text.value.decode()
        self.sm = 10 * self._attribute(_MAJOR) + self._attribute(_MINOR)
        self.sm_count = self._attribute(_SM_COUNT)
        self.max_shared = self._attribute(_MAX_SHARED)
        self.total_memory = self.memory()[1]

    def make_current(self) -> None:
        """Let the calling thread use the device."""
        call("cuCtxSetCurrent", self._context)

    def memory(self) -> tuple[int, int]:
        """Free and total bytes."""
        free, total = C.c_size_t(), C.c_size_t()
        call("cuMemGetInfo_v2", C.byref(free), C.byref(total))
        return free.value, total.value

    def _attribute(self, which: int) -> int:
        value = C.c_int()
        call("cuDeviceGetAttribute", C.byref(value), which, self._device)
        return value.value


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 10_000_000 else f"{nbytes / 1e6:.3g} MB"


class Memory:
    """``nbytes`` of device memory, uninitialised."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        pointer = C.c_uint64()
        code = library().cuMemAlloc_v2(C.byref(pointer), C.c_size_t(max(nbytes, 16)))
        if code == _OUT_OF_MEMORY:
            free, total = C.c_size_t(), C.c_size_t()
            call("cuMemGetInfo_v2", C.byref(free), C.byref(total))
            raise ConfigError(
                f"the GPU has no {_size(nbytes)} left: {_size(free.value)} of {_size(total.value)} are free; "
                "use a smaller gpu_memory_fraction or max_batch_size, or end what else uses the GPU"
            )
        if code:
            raise _failure("cuMemAlloc", code)
        self.address = pointer.value
        note(self)

    def fill(self, byte: int, stream: Stream) -> None:
        stream.fill(self.address, byte, self.nbytes)

    def close(self) -> None:
        if self.address:
            release("cuMemFree_v2", address(self.address))
            self.address = 0


class PinnedMemory:
    """``nbytes`` of page-locked host memory: the GPU copies from and to it by itself."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        pointer = C.c_void_p()
        code = library().cuMemHostAlloc(C.byref(pointer), C.c_size_t(max(nbytes, 16)), C.c_uint(0))
        if code == _OUT_OF_MEMORY:
            raise ConfigError(
                f"this machine gives the GPU no {_size(nbytes)} of page-locked memory; use a smaller "
                "max_num_tokens or max_batch_size, or end what else uses memory"
            )
        if code:
            raise _failure("cuMemHostAlloc", code)
        assert pointer.value
        note(self)
        self.address = pointer.value
        self._bytes = (C.c_ubyte * nbytes).from_address(self.address)

    def array(self, dtype: Any) -> npt.NDArray[Any]:
        """The whole of it as a vector of ``dtype``."""
        return np.ctypeslib.as_array(self._bytes).view(dtype)

    def close(self) -> None:
        if self.address:
            release("cuMemFreeHost", C.c_void_p(self.address))
            self.address = 0


class Stream:
    """An ordered queue of work."""

    def __init__(self) -> None:
        self.handle = C.c_void_p()
        call("cuStreamCreate", C.byref(self.handle), _STREAM_NON_BLOCKING)
        note(self)

    def copy_in(self, target: int, source: int, nbytes: int) -> None:
        """Host address ``source`` to device address ``target``."""
        call("cuMemcpyHtoDAsync_v2", address(target), C.c_void_p(source), C.c_size_t(nbytes), self.handle)

    def copy_out(self, target: int, source: int, nbytes: int) -> None:
        """Device address ``source`` to host address ``target``."""
        call("cuMemcpyDtoHAsync_v2", C.c_void_p(target), address(source), C.c_size_t(nbytes), self.handle)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Device address ``source`` to device address ``target``."""
        call("cuMemcpyDtoDAsync_v2", address(target), address(source), C.c_size_t(nbytes), self.handle)

    def fill(self, target: int, byte: int, nbytes: int) -> None:
        """Set ``nbytes`` at device address ``target``."""
        call("cuMemsetD8Async", address(target), C.c_ubyte(byte), C.c_size_t(nbytes), self.handle)

    def wait(self) -> None:
        """Until all of it is done; errors of kernels show here."""
        call("cuStreamSynchronize", self.handle)

    def close(self) -> None:
        if self.handle:
            release("cuStreamDestroy_v2", self.handle)
            self.handle = C.c_void_p()


class Event:
    """A point in a stream that the host can wait for."""

    def __init__(self, *, timing: bool = False) -> None:
        self.handle = C.c_void_p()
        call("cuEventCreate", C.byref(self.handle), 0 if timing else _EVENT_DISABLE_TIMING)
        note(self)

    def record(self, stream: Stream, *, captured: bool = False) -> None:
        """``captured``: in a stream that is being captured, record whenever the graph comes by."""
        if captured:
            call("cuEventRecordWithFlags", self.handle, stream.handle, C.c_uint(_EVENT_RECORD_EXTERNAL))
        else:
            call("cuEventRecord", self.handle, stream.handle)

    def wait(self) -> None:
        call("cuEventSynchronize", self.handle)

    def milliseconds_since(self, start: Event) -> float:
        value = C.c_float()
        call("cuEventElapsedTime", C.byref(value), start.handle, self.handle)
        return value.value

    def close(self) -> None:
        if self.handle:
            release("cuEventDestroy_v2", self.handle)
            self.handle = C.c_void_p()


class Function:
    """A kernel of a cubin, ready to launch with ``shared`` bytes of dynamic shared memory."""

    def __init__(self, image: bytes, name: str, shared: int) -> None:
        self._module = C.c_void_p()
        call("cuModuleLoadData", C.byref(self._module), image)
        note(self)
        self.handle = C.c_void_p()
        call("cuModuleGetFunction", C.byref(self.handle), self._module, name.encode())
        self.shared = shared
        if shared > _SHARED_DEFAULT:
            call("cuFuncSetAttribute", self.handle, _FUNC_MAX_DYNAMIC_SHARED, C.c_int(shared))

    def parameter_sizes(self) -> list[int] | None:
        """Bytes of each parameter; None where the driver (before CUDA 12.4) does not say."""
        try:
            ask = library().cuFuncGetParamInfo
        except AttributeError:
            return None
        sizes: list[int] = []
        offset, size = C.c_size_t(), C.c_size_t()
        while not ask(self.handle, C.c_size_t(len(sizes)), C.byref(offset), C.byref(size)):
            if len(sizes) == _MAX_PARAMETERS:
                return None
            sizes.append(size.value)
        return sizes

    def close(self) -> None:
        if self._module:
            release("cuModuleUnload", self._module)
            self._module = C.c_void_p()


class Graph:
    """Work that was captured from a stream, launched again as one."""

    def __init__(self, handle: C.c_void_p) -> None:
        self._graph = handle
        self._executable = C.c_void_p()
        try:
            call("cuGraphInstantiateWithFlags", C.byref(self._executable), handle, C.c_ulonglong(0))
        except DeviceError:
            release("cuGraphDestroy", handle)
            raise

    def launch(self, stream: Stream) -> None:
        call("cuGraphLaunch", self._executable, stream.handle)

    def close(self) -> None:
        if self._executable:
            release("cuGraphExecDestroy", self._executable)
            release("cuGraphDestroy", self._graph)
            self._executable = C.c_void_p()


class capture:
    """Context manager: what is put into ``stream`` becomes ``graph`` instead of running."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.graph: Graph | None = None

    def __enter__(self) -> capture:
        call("cuStreamBeginCapture_v2", self._stream.handle, _CAPTURE_THREAD_LOCAL)
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        handle = C.c_void_p()
        code = library().cuStreamEndCapture(self._stream.handle, C.byref(handle))
        if error is not None:  # which says more than what ending says of it
            if handle:
                release("cuGraphDestroy", handle)
        elif code:
            raise _failure("cuStreamEndCapture", code)
        else:
            self.graph = Graph(handle)
