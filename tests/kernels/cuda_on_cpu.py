"""Kernels in CUDA C++ as C++ for this machine, their PTX emulated (``cuda_on_cpu.h``)."""

from __future__ import annotations

import ctypes as C
import functools
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pelton.kernels.gpu.nvrtc import KERNELS
from pelton.kernels.launch import CudaSource, LaunchSpec

HERE = Path(__file__).parent
#: Libraries of one process would share their unique variables, the inline ones.
FLAGS = ("-std=c++20", "-O1", "-w", "-fPIC", "-fno-gnu-unique", "-fno-exceptions")
#: Functions of one PTX instruction are the header's.
_FUNCTION = re.compile(
    r"(?:template <[^>]*>\n)?DEVICE \w+ (\w+)\([^{;]*\) \{.*?(?:^\}\n|\}\n(?=\n|#|//|DEVICE))", re.S | re.M
)


def library(launch: LaunchSpec, run: str, folder: Path, header: str = "cuda_on_cpu.h") -> Any:
    """The kernel of ``launch`` and ``run``: C++ that calls ``cpu::run``, in which ``SIGNATURE`` and ``CALL``
    stand for the kernel's parameters and a call of it with them. ``header``: included first."""
    source = launch.kernel
    assert isinstance(source, CudaSource)
    numbers = {**dict(source.constants), "SHARED": source.shared, "LAUNCHED": source.threads}
    return compiled(_translated(source, run, header), numbers, folder)


def compiled(text: str, macros: Mapping[str, int | str], folder: Path, *included: Path) -> Any:
    """The library of C++ ``text``, made in ``folder``; ``included``: its headers' folders beside this one."""
    defined = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    (folder / "kernel.cpp").write_text(defined + text)
    standard = Path(_standard_headers().name) / "standard.h"
    folders = [f"-I{path}" for path in (HERE, *included)]
    command = ["g++", *FLAGS, "-shared", *folders, "-include", standard, "kernel.cpp", "-o", "x.so"]
    subprocess.run(command, cwd=folder, check=True)
    return C.CDLL(str(folder / "x.so"))


@functools.cache
def _standard_headers() -> tempfile.TemporaryDirectory[str]:
    """A folder with a precompiled ``standard.h``, what ``cuda_on_cpu.h`` includes: a third of a compile.

    Macros come after it: SHARED means something to the C library's headers.
    """
    folder = tempfile.TemporaryDirectory(prefix="pelton-standard-")
    includes = re.findall(r"^#include <.*>\n", (HERE / "cuda_on_cpu.h").read_text(), re.M)
    (Path(folder.name) / "standard.h").write_text("".join(includes))
    command = ["g++", *FLAGS, "-x", "c++-header", "standard.h", "-o", "standard.h.gch"]
    subprocess.run(command, cwd=folder.name, check=True)
    return folder


def _translated(source: CudaSource, run: str, header: str) -> str:
    name = source.function
    text = (KERNELS / source.file).read_text()
    folders = (KERNELS / "gpu", (KERNELS / source.file).parent)
    shared = {path.name: path.read_text() for folder in folders for path in folder.glob("*.cuh")}
    shared |= {"hopper.cuh": "", "shared.cuh": ""}  # ``header`` has these
    include = re.compile(r'#include "(\w+\.cuh)"')
    while include.search(text):
        text = include.sub(lambda m: shared[m[1]], text)
    text = _FUNCTION.sub(lambda m: "" if "asm" in m[0] else m[0], text.replace("#pragma once", ""))
    signature = re.search(rf"\b{name}\(([^{{]*?\*[^{{]*?)\) \{{", text, re.S)
    assert signature
    text = re.sub(rf'extern "C" __global__.*?(?=\b{name}\()', "void ", text, flags=re.S)
    text = re.sub(r"extern __shared__.*?memory\[\];", "unsigned char* memory = shared_memory();", text)
    text = re.sub(r'asm volatile\("griddepcontrol[^;]*;"\);', "", text)
    assert "asm" not in text
    # Parameters that not all forms of a kernel have.
    given = dict(source.constants)
    parameters = re.sub(
        r"#if (\w+)\n(.*?)#endif\n", lambda m: m[2] if given[m[1]] else "", signature[1], flags=re.S
    )
    parameters = parameters.replace("SINKS_PARAMETER", ", const float* sinks" if given.get("SINKS") else "")
    names = ", ".join(part.split()[-1].lstrip("*") for part in parameters.split(","))
    run = run.replace("SIGNATURE", parameters).replace("CALL", f"{name}({names})")
    return f'#include "{header}"\n{text}\n{run}'
