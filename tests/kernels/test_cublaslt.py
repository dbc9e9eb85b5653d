"""What is kept of products by cuBLASLt: as much after a day of steps of every size as after an hour."""

from __future__ import annotations

import ctypes as C
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from pelton.kernels.gpu import cublaslt
from pelton.kernels.gpu.cublaslt import CublasLt
from pelton.kernels.gpu.driver import Stream
from pelton.kernels.gpu.null import NullLibrary, null_gpu

COLUMNS, ODD_IS_REFUSED = 3, 15


class Library(NullLibrary):
    """Remembers descriptors, the columns they have, and the algorithm that each product ran with."""

    def __init__(self) -> None:
        super().__init__({})
        self.alive: Counter[str] = Counter()
        self.columns: dict[int, int] = {}
        self.searched: list[int] = []
        self.products: list[tuple[int, int, int]] = []
        """Tokens of x, of out, and those that its algorithm was searched for."""
        self.picky = False
        self.made = 0

    def _make(self, kind: str, handle: Any) -> int:
        self.alive[kind] += 1
        self.made += 1
        handle._obj.value = self.made
        return 0

    def cublasLtCreate(self, handle: Any) -> int:
        handle._obj.value = 1
        return 0

    def cublasLtMatmulDescCreate(self, handle: Any, *_: Any) -> int:
        return self._make("description", handle)

    def cublasLtMatmulDescDestroy(self, _handle: Any) -> int:
        self.alive["description"] -= 1
        return 0

    def cublasLtMatrixLayoutCreate(self, handle: Any, _type: int, _rows: Any, columns: Any, _: Any) -> int:
        self._make("layout", handle)
        self.columns[handle._obj.value] = columns.value
        return 0

    def cublasLtMatrixLayoutDestroy(self, _handle: Any) -> int:
        self.alive["layout"] -= 1
        return 0

    def cublasLtMatrixLayoutSetAttribute(self, handle: Any, which: int, value: Any, _size: Any) -> int:
        assert which == COLUMNS
        self.columns[handle.value] = value._obj.value
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments: Any) -> int:
        tokens = self.columns[arguments[3].value]
        self.searched.append(tokens)
        arguments[-2]._obj.algo[0] = tokens
        arguments[-1]._obj.value = 1
        return 0

    def cublasLtMatmulAlgoCheck(self, _handle: Any, _d: Any, _a: Any, b: Any, *_: Any) -> int:
        return ODD_IS_REFUSED if self.picky and self.columns[b.value] % 2 else 0

    def cublasLtMatmul(self, *arguments: Any) -> int:
        x, out, algorithm = arguments[6], arguments[11], arguments[12]
        self.products.append((self.columns[x.value], self.columns[out.value], algorithm._obj[0]))
        return 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    with null_gpu():
        library = Library()
        monkeypatch.setattr(cublaslt, "library", lambda: library)
        yield library


def multiply(cublas: CublasLt, tokens: int, n: int = 64) -> None:
    addresses = {"x": 1 << 20, "weight": 2 << 20, "out": 3 << 20}
    dtypes = {"dtype": "bfloat16", "out_dtype": "bfloat16"}
    cublas.matmul(Stream(), tokens=tokens, n=n, k=128, x_row=128, **dtypes, **addresses)


def test_a_product_has_its_own_tokens_and_the_algorithm_of_the_next_multiple_of_eight(
    gpu: Library,
) -> None:
    cublas = CublasLt()
    for tokens in (5, 8, 3, 64, 5, 17):
        multiply(cublas, tokens)
    assert gpu.products == [(5, 5, 8), (8, 8, 8), (3, 3, 8), (64, 64, 64), (5, 5, 8), (17, 17, 24)]
    assert gpu.searched == [8, 64, 24]


def test_an_algorithm_that_does_not_take_a_number_of_tokens_is_not_used_for_it(gpu: Library) -> None:
    gpu.picky, cublas = True, CublasLt()
    for tokens in (6, 7, 7):
        multiply(cublas, tokens)
    assert gpu.products == [(6, 6, 8), (7, 7, 7), (7, 7, 7)]
    assert gpu.searched == [8, 7]


def test_descriptors_are_as_many_as_shapes_and_are_given_back(
    gpu: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cublaslt, "_MOST", 20)
    cublas = CublasLt()
    for tokens in range(1, 200):
        for n in (64, 32):
            multiply(cublas, tokens, n)
    assert gpu.alive == {"description": 2, "layout": 8}
    assert [len(s.algorithms) for s in cublas._shapes.values()] == [20, 20]
    assert all(x == out and x <= found < x + 8 for x, out, found in gpu.products)
    cublas.close()
    assert not +gpu.alive
    assert C.sizeof(cublaslt._Heuristic) == 96
