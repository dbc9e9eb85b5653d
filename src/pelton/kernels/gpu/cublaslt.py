"""Products by cuBLASLt, through ctypes: what large steps are left to.

Matrices are row-major here and column-major there: ``out = x @ weight.T`` is computed as its transpose,
``weight (K x N, transposed) @ x (K x T)``.
"""

from __future__ import annotations

import ctypes as C
import functools
from typing import Any

from pelton.errors import EngineError, MissingDependencyError
from pelton.kernels.gpu import shared_library
from pelton.kernels.gpu.driver import Memory, Stream, address, check_context

_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}
_COMPUTE_32F, _R_32F = 68, 0
_TRANSA, _TRANSPOSED = 3, 1
_MAX_WORKSPACE = 1
WORKSPACE_BYTES = 32 << 20
#: Steps of so many tokens more have algorithms of their own.
_TOKENS = 8


class _Heuristic(C.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", C.c_uint64 * 8),
        ("workspace", C.c_size_t),
        ("state", C.c_int),
        ("waves", C.c_float),
        ("reserved", C.c_int * 4),
    )


@functools.cache
def library() -> Any:
    """libcublasLt of the system or of the Python packages that carry it.

    Raises ``MissingDependencyError``.
    """
    found = shared_library.find(("libcublasLt.so.13", "libcublasLt.so.12"), "cublas")
    if found is not None:
        return found
    raise MissingDependencyError(
        "cuBLASLt is not here, and this engine uses it; install it with: pip install nvidia-cublas"
    )


def available() -> bool:
    """Whether the library can be loaded."""
    try:
        library()
    except MissingDependencyError:
        return False
    return True


def _call(name: str, *args: Any) -> None:
    code = getattr(library(), name)(*args)
    if code:
        check_context()
        raise EngineError(f"cuBLASLt failed ({name}, status {code})")


class CublasLt:
    """A handle with its workspace."""

    def __init__(self) -> None:
        self.handle = C.c_void_p()
        _call("cublasLtCreate", C.byref(self.handle))
        self.workspace = Memory(WORKSPACE_BYTES)
        self._preference = C.c_void_p()
        _call("cublasLtMatmulPreferenceCreate", C.byref(self._preference))
        size = C.c_size_t(WORKSPACE_BYTES)
        _call(
            "cublasLtMatmulPreferenceSetAttribute",
            self._preference,
            _MAX_WORKSPACE,
            C.byref(size),
            C.c_size_t(8),
        )
        self._plans: dict[tuple[object, ...], tuple[C.c_void_p, ...]] = {}

    def matmul(
        self,
        stream: Stream,
        *,
        tokens: int,
        n: int,
        k: int,
        x_row: int,
        dtype: str,
        out_dtype: str,
        x: int,
        weight: int,
        out: int,
        residual: int = 0,
        residual_row: int = 0,
    ) -> None:
        """``out`` (tokens, n) = ``x`` (tokens, k) @ ``weight`` (n, k) transposed (+ ``residual``).

        Addresses of the device; the residual is of ``out``'s shape and type, 0: none. ``x_row``,
        ``residual_row``: elements from one row to the next (0: ``n``).
        """
        key = (tokens, n, k, x_row, dtype, out_dtype, residual_row or n)
        if key not in self._plans:
            self._plans[key] = self._plan(*key)  # type: ignore[arg-type]
        description, a, b, c, d, algorithm = self._plans[key]
        one, beta = C.c_float(1.0), C.c_float(1.0 if residual else 0.0)
        _call(
            "cublasLtMatmul",
            self.handle,
            description,
            C.byref(one),
            address(weight),
            a,
            address(x),
            b,
            C.byref(beta),
            address(residual or out),
            c,
            address(out),
            d,
            algorithm,
            address(self.workspace.address),
            C.c_size_t(WORKSPACE_BYTES),
            stream.handle,
        )

    def _plan(
        self, tokens: int, n: int, k: int, x_row: int, dtype: str, out_dtype: str, residual_row: int
    ) -> tuple[Any, ...]:
        """The algorithm is that of the next multiple of eight tokens where it takes fewer too: a step gives
        the same bits as it does padded to a graph's size, of those up to 64."""
        layouts = (
            _layout(dtype, k, n, k),
            _layout(dtype, k, tokens, x_row),
            _layout(out_dtype, n, tokens, residual_row),
            _layout(out_dtype, n, tokens, n),
        )
        rounded = -(-tokens // _TOKENS) * _TOKENS
        if rounded != tokens:
            key = (rounded, n, k, x_row, dtype, out_dtype, residual_row)
            if key not in self._plans:
                self._plans[key] = self._plan(*key)
            description, *_, algorithm = self._plans[key]
            if self._takes(description, layouts, algorithm):
                return description, *layouts, algorithm
        description = C.c_void_p()
        _call("cublasLtMatmulDescCreate", C.byref(description), _COMPUTE_32F, _R_32F)
        transposed = C.c_int32(_TRANSPOSED)
        _call("cublasLtMatmulDescSetAttribute", description, _TRANSA, C.byref(transposed), C.c_size_t(4))
        found, count = _Heuristic(), C.c_int()
        _call(
            "cublasLtMatmulAlgoGetHeuristic",
            self.handle,
            description,
            *layouts,
            self._preference,
            1,
            C.byref(found),
            C.byref(count),
        )
        if not count.value:
            raise EngineError(f"cuBLASLt has no algorithm for {tokens}x{k} @ {k}x{n} in {dtype}")
        return description, *layouts, found.algo

    def _takes(self, description: Any, layouts: tuple[C.c_void_p, ...], algorithm: Any) -> bool:
        """Whether ``algorithm`` multiplies matrices of ``layouts``: of float32, not all take any number."""
        needs = _Heuristic()
        status: int = library().cublasLtMatmulAlgoCheck(
            self.handle, description, *layouts, C.byref(algorithm), C.byref(needs)
        )
        return status == 0 and int(needs.workspace) <= WORKSPACE_BYTES

    def close(self) -> None:
        if self.handle:
            library().cublasLtDestroy(self.handle)  # it may fail where the GPU has: nothing is left to free
            self.handle = C.c_void_p()
        self.workspace.close()


def _layout(dtype: str, rows: int, columns: int, leading: int) -> C.c_void_p:
    layout = C.c_void_p()
    _call(
        "cublasLtMatrixLayoutCreate",
        C.byref(layout),
        _TYPES[dtype],
        C.c_uint64(rows),
        C.c_uint64(columns),
        C.c_int64(leading),
    )
    return layout
