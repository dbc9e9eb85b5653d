"""What the driver's errors become, with a libcuda that answers as it is told."""

from __future__ import annotations

import ctypes as C
from collections import Counter
from typing import Any

import pytest

from pelton.errors import ConfigError, DeviceError, EngineError
from pelton.kernels.gpu import cublaslt, driver
from pelton.kernels.gpu.taken import given_back_on_error

OUT_OF_MEMORY, INVALID_VALUE, ILLEGAL_ADDRESS = 2, 1, 700
WORDS = {
    OUT_OF_MEMORY: b"out of memory",
    INVALID_VALUE: b"invalid argument",
    ILLEGAL_ADDRESS: b"an illegal memory access was encountered",
}


class Libcuda:
    """Every function succeeds unless ``codes`` has it; addresses count up."""

    def __init__(self) -> None:
        self.codes: dict[str, int] = {}
        self.calls: Counter[str] = Counter()
        self._next = 4096

    def __getattr__(self, name: str) -> Any:
        def function(*args: Any) -> int:
            self.calls[name] += 1
            code = self.codes.get(name, 0)
            if not code and name in ("cuMemAlloc_v2", "cuMemHostAlloc", "cuStreamCreate", "cuEventCreate"):
                self._next += 4096
                args[0]._obj.value = self._next
            if name == "cuMemGetInfo_v2" and not code:
                args[0]._obj.value, args[1]._obj.value = 3_000_000_000, 80_000_000_000
            if name == "cuGetErrorString":
                args[1]._obj.value = WORDS[args[0]]
            return code

        return function


@pytest.fixture
def libcuda(monkeypatch: pytest.MonkeyPatch) -> Libcuda:
    library = Libcuda()
    monkeypatch.setattr(driver, "library", lambda: library)
    return library


def test_memory_that_is_not_there_is_one_sentence_with_its_way_out(libcuda: Libcuda) -> None:
    libcuda.codes["cuMemAlloc_v2"] = OUT_OF_MEMORY
    with pytest.raises(ConfigError, match=r"no 5.00 GB left: 3.00 GB of 80.00 GB are free; use"):
        driver.Memory(5_000_000_000)


def test_a_fault_of_a_kernel_is_a_device_error_wherever_it_shows(libcuda: Libcuda) -> None:
    stream, memory = driver.Stream(), driver.Memory(64)
    libcuda.codes = dict.fromkeys(
        ("cuStreamSynchronize", "cuLaunchKernelEx", "cuMemGetInfo_v2", "cuMemFree_v2"), ILLEGAL_ADDRESS
    )
    said = "an illegal memory access was encountered; restart to use it again"
    with pytest.raises(DeviceError, match=said):
        stream.wait()
    with pytest.raises(DeviceError, match=said):
        driver.launch(driver.LaunchConfig(), C.c_void_p(), None)
    with pytest.raises(DeviceError, match=said):
        driver.check_context()
    memory.close()  # it is gone: nothing to complain about
    libcuda.codes["cuMemFree_v2"] = INVALID_VALUE
    with pytest.raises(DeviceError, match="cuMemFree_v2"):
        driver.Memory(64).close()


def test_a_launch_that_cannot_be_is_the_engine_s_fault(libcuda: Libcuda) -> None:
    libcuda.codes["cuLaunchKernelEx"] = INVALID_VALUE
    with pytest.raises(EngineError, match=r"refuses a launch: invalid argument; grid \[0, 0, 0\]"):
        driver.launch(driver.LaunchConfig(), C.c_void_p(), None)


def test_cublaslt_asks_whether_the_gpu_is_still_there(
    libcuda: Libcuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        def cublasLtMatmul(self) -> int:
            return 13

    monkeypatch.setattr(cublaslt, "library", Failing)
    with pytest.raises(EngineError, match="cuBLASLt failed"):
        cublaslt._call("cublasLtMatmul")
    libcuda.codes["cuMemGetInfo_v2"] = ILLEGAL_ADDRESS
    with pytest.raises(DeviceError, match="illegal memory access"):
        cublaslt._call("cublasLtMatmul")


def test_what_was_taken_before_an_error_is_given_back(libcuda: Libcuda) -> None:
    def make() -> None:
        driver.Memory(64)
        driver.PinnedMemory(64)
        driver.Event()
        driver.Stream()
        libcuda.codes["cuMemAlloc_v2"] = OUT_OF_MEMORY
        driver.Memory(64)

    kept = driver.Memory(64)
    with pytest.raises(ConfigError), given_back_on_error():
        make()
    given = ("cuMemFree_v2", "cuMemFreeHost", "cuEventDestroy_v2", "cuStreamDestroy_v2")
    assert [libcuda.calls[name] for name in given] == [1, 1, 1, 1]
    with given_back_on_error():
        driver.Stream()
    assert libcuda.calls["cuStreamDestroy_v2"] == 1
    kept.close()
    assert libcuda.calls["cuMemFree_v2"] == 2
