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

_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14, "float8_e4m3fn": 28}
_COMPUTE_32F, _R_32F = 68, 0
_TRANSA, _TRANSPOSED = 3, 1
#: Scales of the weight and of x: where they are, and that there is one for each row.
_SCALES, _SCALE_MODES, _OUTER_VECTOR = (17, 18), (31, 32), 3
_MAX_WORKSPACE = 1
WORKSPACE_BYTES = 32 << 20
#: cublasLtMatrixLayoutAttribute_t: columns, which are tokens
_COLUMNS = 3
#: Steps of so many tokens more have algorithms of their own.
_TOKENS = 8
#: Numbers of tokens whose algorithms are kept, of each shape: the oldest is searched for again.
_MOST = 1024


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


class _Shape:
    """Products of one shape but for their tokens: descriptors, and an algorithm for each number of tokens."""

    def __init__(self, n: int, k: int, x_row: int, dtype: str, out_dtype: str, residual_row: int) -> None:
        self.what = f"k={k} n={n} in {dtype}"
        self.description = C.c_void_p()
        _call("cublasLtMatmulDescCreate", C.byref(self.description), _COMPUTE_32F, _R_32F)
        transposed = C.c_int32(_TRANSPOSED)
        _call("cublasLtMatmulDescSetAttribute", self.description, _TRANSA, C.byref(transposed), C.c_size_t(4))
        if dtype == "float8_e4m3fn":
            mode = C.c_int32(_OUTER_VECTOR)
            for attribute in _SCALE_MODES:
                _call(
                    "cublasLtMatmulDescSetAttribute",
                    self.description,
                    attribute,
                    C.byref(mode),
                    C.c_size_t(4),
                )
        self.layouts = (
            _layout(dtype, k, n, k),
            _layout(dtype, k, 1, x_row),
            _layout(out_dtype, n, 1, residual_row),
            _layout(out_dtype, n, 1, n),
        )
        self.algorithms: dict[int, Any] = {}
        """By tokens."""
        self._tokens = 1

    def set_tokens(self, tokens: int) -> None:
        """Let the descriptors be of so many. What was launched with them before has read them."""
        if tokens != self._tokens:
            count = C.c_uint64(tokens)
            for layout in self.layouts[1:]:
                _call("cublasLtMatrixLayoutSetAttribute", layout, _COLUMNS, C.byref(count), C.c_size_t(8))
            self._tokens = tokens

    def set_scales(self, weight: int, x: int) -> None:
        """Addresses of float32 vectors, where rows have scales."""
        for attribute, scales in zip(_SCALES, (weight, x), strict=True):
            if scales:
                where = C.c_void_p(scales)
                _call(
                    "cublasLtMatmulDescSetAttribute",
                    self.description,
                    attribute,
                    C.byref(where),
                    C.c_size_t(8),
                )

    def close(self) -> None:
        for layout in self.layouts:
            library().cublasLtMatrixLayoutDestroy(layout)
        library().cublasLtMatmulDescDestroy(self.description)


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
        self._shapes: dict[tuple[object, ...], _Shape] = {}

    def matmul(self, stream: Stream, *, tokens: int, **product: Any) -> None:
        """Multiply once: the arguments are ``Product``'s."""
        Product(self, **product).run(stream, tokens)

    def shape(self, n: int, k: int, x_row: int, dtype: str, out_dtype: str, residual_row: int) -> _Shape:
        """What products of this shape share."""
        key = (n, k, x_row, dtype, out_dtype, residual_row)
        found = self._shapes.get(key)
        if found is None:
            found = self._shapes[key] = _Shape(*key)
        return found

    def algorithm(self, shape: _Shape, tokens: int) -> Any:
        """That of the next multiple of eight tokens where it takes fewer too: a step gives the same bits as
        it does padded to a graph's size, of those up to 64."""
        found = shape.algorithms.get(tokens)
        if found is not None:
            return found
        rounded = -(-tokens // _TOKENS) * _TOKENS
        if rounded != tokens:
            found = self.algorithm(shape, rounded)
            shape.set_tokens(tokens)
            if not self._takes(shape, found):
                found = None
        shape.set_tokens(tokens)
        if found is None:
            found = self._search(shape, tokens)
        while len(shape.algorithms) >= _MOST:
            del shape.algorithms[next(iter(shape.algorithms))]
        shape.algorithms[tokens] = found
        return found

    def _search(self, shape: _Shape, tokens: int) -> Any:
        found, count = _Heuristic(), C.c_int()
        _call(
            "cublasLtMatmulAlgoGetHeuristic",
            self.handle,
            shape.description,
            *shape.layouts,
            self._preference,
            1,
            C.byref(found),
            C.byref(count),
        )
        if not count.value:
            raise EngineError(f"cuBLASLt has no algorithm for a product of {tokens} tokens, {shape.what}")
        return found.algo

    def _takes(self, shape: _Shape, algorithm: Any) -> bool:
        """Whether ``algorithm`` does for the descriptors as they are: of float32, not all take any number."""
        needs = _Heuristic()
        status: int = library().cublasLtMatmulAlgoCheck(
            self.handle, shape.description, *shape.layouts, C.byref(algorithm), C.byref(needs)
        )
        return status == 0 and int(needs.workspace) <= WORKSPACE_BYTES

    def close(self) -> None:
        if self.handle:
            # They may fail where the GPU has: nothing is left to free.
            for shape in self._shapes.values():
                shape.close()
            self._shapes.clear()
            library().cublasLtMatmulPreferenceDestroy(self._preference)
            library().cublasLtDestroy(self.handle)
            self.handle = C.c_void_p()
        self.workspace.close()


class Product:
    """``out`` (tokens, n) = ``x`` (tokens, k) @ ``weight`` (n, k) transposed (+ ``residual``), any tokens.

    Addresses of the device; the residual is of ``out``'s shape and type, 0: none. ``x_row``,
    ``residual_row``: elements from one row to the next (0: ``n``). ``x_scales`` (tokens) and
    ``weight_scales`` (n), float32: what rows of float8_e4m3fn are to be multiplied by.
    """

    def __init__(
        self,
        cublas: CublasLt,
        *,
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
        x_scales: int = 0,
        weight_scales: int = 0,
    ) -> None:
        self._cublas, self._scales = cublas, (weight_scales, x_scales)
        self._key = n, k, x_row, dtype, out_dtype, residual_row or n
        self._addresses = tuple(map(address, (weight, x, residual or out, out)))
        self._factors = C.c_float(1.0), C.c_float(1.0 if residual else 0.0)
        self._shape: _Shape | None = None
        self._arguments: tuple[Any, ...] = ()

    def _bind(self) -> _Shape:
        """Its arguments, where it is first needed: not every machine takes every shape."""
        cublas, shape = self._cublas, self._cublas.shape(*self._key)
        one, beta = map(C.byref, self._factors)
        weight, x, residual, out = self._addresses
        a, b, c, d = shape.layouts
        self._arguments = (cublas.handle, shape.description, one, weight, a, x, b, beta, residual, c, out, d)
        self._space = address(cublas.workspace.address), C.c_size_t(WORKSPACE_BYTES)
        self._shape = shape
        return shape

    def run(self, stream: Stream, tokens: int) -> None:
        """Put it into ``stream``."""
        shape = self._shape or self._bind()
        if any(self._scales):
            shape.set_scales(*self._scales)
        algorithm = self._cublas.algorithm(shape, tokens)
        shape.set_tokens(tokens)
        _call("cublasLtMatmul", *self._arguments, C.byref(algorithm), *self._space, stream.handle)


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
