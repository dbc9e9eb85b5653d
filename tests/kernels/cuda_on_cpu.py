"""Kernels in CUDA C++ as C++ for this machine, their PTX emulated (``cuda_on_cpu.h``)."""

from __future__ import annotations

import ctypes as C
import re
import subprocess
from pathlib import Path
from typing import Any

from pelton.kernels.gpu.nvrtc import KERNELS
from pelton.kernels.launch import CudaSource, LaunchSpec

#: Functions of one PTX instruction are the header's.
_FUNCTION = re.compile(
    r"(?:template <[^>]*>\n)?DEVICE \w+ (\w+)\([^{;]*\) \{.*?(?:^\}\n|\}\n(?=\n|#|//|DEVICE))", re.S | re.M
)


def library(launch: LaunchSpec, run: str, folder: Path, header: str = "cuda_on_cpu.h") -> Any:
    """The kernel of ``launch`` and ``run``: C++ that calls ``cpu::run``, in which ``SIGNATURE`` and ``CALL``
    stand for the kernel's parameters and a call of it with them. ``header``: included first."""
    source = launch.kernel
    assert isinstance(source, CudaSource)
    (folder / "kernel.cpp").write_text(_translated(source, run, header))
    numbers = {**dict(source.constants), "SHARED": source.shared, "LAUNCHED": source.threads}
    macros = [f"-D{name}={value}" for name, value in numbers.items()]
    # Libraries of one process would share their inline variables.
    flags = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-fno-gnu-unique", f"-I{Path(__file__).parent}"]
    command = ["g++", *flags, *macros]
    subprocess.run([*command, "kernel.cpp", "-o", "x.so"], cwd=folder, check=True)
    return C.CDLL(str(folder / "x.so"))


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
    names = ", ".join(part.split()[-1].lstrip("*") for part in signature[1].split(","))
    run = run.replace("SIGNATURE", signature[1]).replace("CALL", f"{name}({names})")
    return f'#include "{header}"\n{text}\n{run}'
