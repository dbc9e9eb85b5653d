"""Python functions as kernels: called by thread 0 of the native runner, on NumPy views of the operands."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pelton.dtypes import NATIVE_CODE
from pelton.errors import EngineError
from pelton.kernels.native import Array, Attr, Call, Tensor

_Function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Call))
#: bfloat16 as uint16 and fp8 as uint8, as everywhere in NumPy.
_BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}
_NUMPY = {code: np.dtype(_BITS.get(name, name)) for name, code in NATIVE_CODE.items()}


class HostKernel:
    """``function(**tensors, **attrs, out=...)`` of one instruction, as a function pointer.

    ``tensors``: names of the instruction's inputs; an absent optional one is None. ``out`` is an array, or
    a tuple of several. An exception is kept in ``error`` and ends the step.
    """

    kernel = "external.host"

    def __init__(
        self, function: Callable[..., Any], tensors: Sequence[str], attrs: Mapping[str, Attr]
    ) -> None:
        self._function, self._tensors, self._attrs = function, tuple(tensors), dict(attrs)
        self.error: BaseException | None = None
        self._pointer = _Function(self._run)

    @property
    def address(self) -> int:
        """Of the C function; valid while this object lives."""
        return int(ctypes.cast(self._pointer, ctypes.c_void_p).value or 0)

    def _run(self, pointer: Any) -> int:
        try:
            call = pointer.contents
            inputs = {name: _array(call.in_[i]) for i, name in enumerate(self._tensors)}
            outputs = tuple(_array(call.out[i]) for i in range(call.n_out))
            self._function(**inputs, **self._attrs, out=outputs[0] if len(outputs) == 1 else outputs)
        except BaseException as error:  # nothing may cross into C, an interrupt neither
            self.error = error
            return 1
        return 0


def import_function(path: str, package: str = "", version: str = "") -> Callable[..., Any]:
    """The function "package.module:name". Raises ``EngineError`` saying what is not installed."""
    module, _, name = path.partition(":")
    wanted = f"{package} {version}" if package else module.partition(".")[0]
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        raise EngineError(f"the engine needs {wanted}, which is not installed here ({error})") from error
    except Exception as error:
        raise EngineError(
            f"the engine needs {path} of {wanted}, which cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not callable(found):
        raise EngineError(f"the engine needs the function {path} of {wanted}, and that is no function")
    return found  # type: ignore[no-any-return]


def _array(pointer: Any) -> Array | None:
    """A view of the tensor behind a ``pelton_tensor*``; None for NULL."""
    if not pointer:
        return None
    t: Tensor = pointer.contents
    dtype, shape, strides = _NUMPY[t.dtype], tuple(t.shape[: t.ndim]), t.stride[: t.ndim]
    if 0 in shape:
        return np.empty(shape, dtype)
    extent = dtype.itemsize * (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)))
    memory = (ctypes.c_char * extent).from_address(t.data)
    return np.ndarray(shape, dtype, memory, strides=tuple(s * dtype.itemsize for s in strides))
