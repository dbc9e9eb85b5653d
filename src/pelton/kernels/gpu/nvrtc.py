"""Compiles CUDA C++ by NVRTC, through ctypes: no GPU, no toolkit and no headers are needed."""

from __future__ import annotations

import ctypes as C
import functools
from pathlib import Path
from typing import Any

from pelton.errors import BuildError, MissingDependencyError
from pelton.kernels.gpu import shared_library

KERNELS = Path(__file__).parents[1]
"""Where sources are; ``gpu`` in it has what they include."""
#: Lambdas are functions of the host where nothing else is said (up to CUDA 13.0).
FLAGS = ("--std=c++17", "--device-as-default-execution-space")


@functools.cache
def library() -> Any:
    """libnvrtc of the system or of the Python packages that carry it. Raises ``MissingDependencyError``."""
    found = shared_library.find(("libnvrtc.so.13", "libnvrtc.so.12"), "cuda_nvrtc")
    if found is not None:
        return found
    raise MissingDependencyError(
        "engines for this GPU have kernels in CUDA C++, and NVRTC, which compiles them, is not here; install "
        "it with: pip install nvidia-cuda-nvrtc"
    )


def available() -> bool:
    """Whether the library can be loaded."""
    try:
        library()
    except MissingDependencyError:
        return False
    return True


@functools.lru_cache(maxsize=4)  # kernels of one file follow each other
def compile_file(file: str, architecture: str, constants: tuple[tuple[str, int], ...]) -> bytes:
    """The cubin of ``file`` (below ``pelton/kernels``) for ``architecture`` (sm_90a); ``constants``: macros.

    For a virtual architecture (compute_80) its PTX, which engines do not have.

    Raises ``BuildError`` with the compiler's first error, ``MissingDependencyError``.
    """
    lib, program = library(), C.c_void_p()
    source = (KERNELS / file).read_bytes()
    if lib.nvrtcCreateProgram(C.byref(program), source, Path(file).name.encode(), 0, None, None):
        raise BuildError(f"NVRTC does not take {file}")
    try:
        macros = [f"--define-macro={name}={value}" for name, value in constants]
        folders = (KERNELS / "gpu", (KERNELS / file).parent)
        options = [f"--gpu-architecture={architecture}", *FLAGS, *(f"-I{f}" for f in folders), *macros]
        array = (C.c_char_p * len(options))(*(option.encode() for option in options))
        if lib.nvrtcCompileProgram(program, len(options), array):
            log = _text(lib.nvrtcGetProgramLogSize, lib.nvrtcGetProgramLog, program).decode(errors="replace")
            lines = [line.strip() for line in log.strip("\0").splitlines() if line.strip()]
            error = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
            raise BuildError(f"the kernel {file} does not compile for {architecture}: {error}")
        if architecture.startswith("compute_"):
            return _text(lib.nvrtcGetPTXSize, lib.nvrtcGetPTX, program)
        return _text(lib.nvrtcGetCUBINSize, lib.nvrtcGetCUBIN, program)
    finally:
        lib.nvrtcDestroyProgram(C.byref(program))


def _text(size_of: Any, read: Any, program: C.c_void_p) -> bytes:
    size = C.c_size_t()
    if size_of(program, C.byref(size)):
        raise BuildError("NVRTC gives no result")
    buffer = C.create_string_buffer(size.value)
    if read(program, buffer):
        raise BuildError("NVRTC gives no result")
    return buffer.raw
