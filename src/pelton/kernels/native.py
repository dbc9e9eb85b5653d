"""The native library from Python: finding it, and running one of its kernels on numpy arrays.

Needs ctypes and numpy only. The ABI is ``csrc/pelton.h``; whole plans run through
``engine.native_plan``.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pelton.dtypes import ITEMSIZE, NATIVE_CODE
from pelton.errors import MissingDependencyError

Array = npt.NDArray[np.generic]
Attr = bool | int | float | str

ABI_VERSION = 2
MAX_DIMS = 4
LIBRARY_PATH = Path(__file__).with_name("libpelton.so")

ERRORS = {
    1: "it is already running in another thread",
    2: "the process forked after its threads were started; load the engine in the child instead",
    3: "the native library has no such kernel for this CPU",
    4: "the step is larger than the plan was built for",
    5: "out of memory",
    6: "a Python function in it failed",
}


class Tensor(ctypes.Structure):
    """``pelton_tensor``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("shape", ctypes.c_int64 * MAX_DIMS),
        ("stride", ctypes.c_int64 * MAX_DIMS),
    )


class Call(ctypes.Structure):
    """``pelton_call``."""

    _fields_ = (
        ("in_", ctypes.POINTER(ctypes.POINTER(Tensor))),
        ("out", ctypes.POINTER(ctypes.POINTER(Tensor))),
        ("attrs", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_int64),
        ("n_in", ctypes.c_int32),
        ("n_out", ctypes.c_int32),
        ("n_attrs", ctypes.c_int32),
        ("function", ctypes.c_void_p),
    )


def _declare(lib: ctypes.CDLL) -> None:
    """Argument types of every function Python calls; without them ctypes would cut pointers."""
    pointer, text, i32 = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32
    signatures = {
        "pelton_abi_version": (i32,),
        "pelton_cpu_level": (text,),
        "pelton_level_name": (text, i32),
        "pelton_has_level": (i32, i32),
        "pelton_kernel_info": (i32, i32, ctypes.POINTER(text), ctypes.POINTER(i32)),
        "pelton_find_kernel": (pointer, text),
        "pelton_find_kernel_at": (pointer, text, i32),
        "pelton_team_create": (pointer, i32),
        "pelton_team_destroy": (None, pointer),
        "pelton_run_kernel": (i32, pointer, pointer, ctypes.POINTER(Call), ctypes.c_int64),
        "pelton_plan_create": (pointer, pointer, text, ctypes.c_int64),
        "pelton_plan_destroy": (None, pointer),
        "pelton_plan_run": (i32, pointer, pointer, pointer, pointer, i32, pointer),
    }
    for name, (result, *arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments


@functools.cache
def load_library() -> ctypes.CDLL:
    """The library, loaded once. Raises ``MissingDependencyError`` when it is absent or stale."""
    if not LIBRARY_PATH.exists():
        raise MissingDependencyError(
            f"the native library is not installed ({LIBRARY_PATH.name} is missing beside pelton.kernels): "
            "install a C++ compiler and reinstall pelton, or run `make native` in a source checkout"
        )
    try:
        lib = ctypes.CDLL(str(LIBRARY_PATH))
        _declare(lib)
    except (OSError, AttributeError) as error:
        raise MissingDependencyError(
            f"the native library cannot be loaded ({error}): reinstall pelton, or run `make native`"
        ) from error
    found = lib.pelton_abi_version()
    if found != ABI_VERSION:
        raise MissingDependencyError(
            f"the native library has ABI {found} where this Pelton needs {ABI_VERSION}: "
            "reinstall pelton, or run `make native`"
        )
    return lib


def available() -> bool:
    """Whether the native library can be used here."""
    try:
        load_library()
    except MissingDependencyError:
        return False
    return True


def cpu_level() -> str:
    """Name of the highest ISA level in use: generic, avx2, avxvnni, avx512 or avx512bf16."""
    return str(load_library().pelton_cpu_level().decode())


@functools.cache
def level_names() -> tuple[str, ...]:
    """Every ISA level the library knows, in order of preference."""
    lib = load_library()
    return tuple(name.decode() for name in iter(map(lib.pelton_level_name, itertools.count()).__next__, None))


@functools.cache
def kernel_levels() -> dict[str, tuple[str, ...]]:
    """Kernels that this CPU can run -> the ISA levels it can run them at, lowest first."""
    here = {name: tuple(v for v in levels if has_level(v)) for name, levels in library_kernels().items()}
    return {name: levels for name, levels in here.items() if levels}


@functools.cache
def library_kernels() -> dict[str, tuple[str, ...]]:
    """All kernels of the library -> the ISA levels they were compiled for, lowest first."""
    lib = load_library()
    found: dict[str, list[int]] = {}
    name, level, i = ctypes.c_char_p(), ctypes.c_int32(), 0
    while lib.pelton_kernel_info(i, ctypes.byref(name), ctypes.byref(level)) == 0:
        assert name.value is not None
        found.setdefault(name.value.decode(), []).append(level.value)
        i += 1
    return {
        k: tuple(lib.pelton_level_name(v).decode() for v in sorted(levels)) for k, levels in found.items()
    }


def has_level(level: str) -> bool:
    """Whether this CPU (under the cap) has an ISA level."""
    names = level_names()
    return level in names and bool(load_library().pelton_has_level(names.index(level)))


def attr_value(attr: Attr | None) -> float:
    """A non-tensor argument as kernels take it: a number; of a string its 32-bit FNV-1a hash; 0 for none."""
    if attr is None:
        return 0.0
    if not isinstance(attr, str):
        return float(attr)
    h = 2166136261
    for byte in attr.encode():
        h = (h ^ byte) * 16777619 & 0xFFFFFFFF
    return float(h)


def native_dtype(array: Array) -> str:
    """Pelton's name of a numpy array's element type (bfloat16 needs saying: ``NativeTensor``)."""
    return str(array.dtype)


@dataclass(frozen=True)
class NativeTensor:
    """A numpy array that stands for something else: bfloat16 (as uint16), or a packed weight
    (uint8 bytes with the logical ``shape`` of its values)."""

    data: Array
    dtype: str
    shape: tuple[int, ...] = ()


def _tensor(operand: Array | NativeTensor) -> Tensor:
    wrapped = operand if isinstance(operand, NativeTensor) else NativeTensor(operand, native_dtype(operand))
    array, shape = wrapped.data, wrapped.shape or wrapped.data.shape
    item = ITEMSIZE[wrapped.dtype]
    assert array.itemsize == item, f"{wrapped.dtype} in an array of {array.dtype}"
    strides = [s // item for s in array.strides] if not wrapped.shape else [0] * len(shape)
    t = Tensor(data=array.ctypes.data, dtype=NATIVE_CODE[wrapped.dtype], ndim=len(shape))
    t.shape[: len(shape)] = shape
    t.stride[: len(shape)] = strides
    return t


def aligned_empty(nbytes: int, alignment: int = 64) -> npt.NDArray[np.uint8]:
    """Uninitialised bytes whose address is a multiple of ``alignment``."""
    raw = np.empty(nbytes + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes]


class Team:
    """Threads that run kernels together; a context manager."""

    def __init__(self, threads: int) -> None:
        self._handle = load_library().pelton_team_create(threads)
        if not self._handle:
            raise OSError(f"cannot start {threads} threads")

    def run(
        self,
        kernel: str,
        inputs: Sequence[Array | NativeTensor | None],
        outputs: Sequence[Array | NativeTensor],
        attrs: Sequence[Attr] = (),
        *,
        workspace_bytes: int = 0,
        level: str | None = None,
        function: int | None = None,
    ) -> None:
        """Run one kernel, by default its best version for this CPU. Raises ``ValueError`` when
        there is none (at ``level``). ``function``: address of what the kernels ``external.*`` call."""
        self.repeat(
            kernel, inputs, outputs, attrs, workspace_bytes=workspace_bytes, level=level, function=function
        )(1)

    def repeat(
        self,
        kernel: str,
        inputs: Sequence[Array | NativeTensor | None],
        outputs: Sequence[Array | NativeTensor],
        attrs: Sequence[Attr] = (),
        *,
        workspace_bytes: int = 0,
        level: str | None = None,
        function: int | None = None,
    ) -> Callable[[int], None]:
        """As ``run``, but a function that runs the kernel n times in a row: to time it."""
        lib = load_library()
        fn = lib.pelton_find_kernel(kernel.encode())
        if level is not None:
            fn = lib.pelton_find_kernel_at(kernel.encode(), level_names().index(level))
        tensors = [None if x is None else _tensor(x) for x in (*inputs, *outputs)]
        pointers = (ctypes.POINTER(Tensor) * len(tensors))(
            *(ctypes.POINTER(Tensor)() if t is None else ctypes.pointer(t) for t in tensors)
        )
        values = np.array([attr_value(a) for a in attrs], np.float64)
        workspace = aligned_empty(workspace_bytes)
        workspace.fill(0xFF)  # NaN: reading before writing shows
        call = Call(
            in_=pointers,
            out=ctypes.cast(
                ctypes.addressof(pointers) + len(inputs) * ctypes.sizeof(ctypes.c_void_p),
                ctypes.POINTER(ctypes.POINTER(Tensor)),
            ),
            attrs=values.ctypes.data,
            workspace=workspace.ctypes.data,
            workspace_bytes=workspace_bytes,
            n_in=len(inputs),
            n_out=len(outputs),
            n_attrs=len(attrs),
            function=function,
        )
        borrowed = (inputs, outputs, tensors, pointers, values, workspace)

        def run(n: int) -> None:
            assert borrowed
            if code := lib.pelton_run_kernel(self._handle, fn, ctypes.byref(call), n):
                raise ValueError(f"kernel {kernel} (level {level or 'best'}) cannot run: {ERRORS[code]}")

        return run

    def close(self) -> None:
        """End the threads; idempotent."""
        if self._handle:
            load_library().pelton_team_destroy(self._handle)
            self._handle = None

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
