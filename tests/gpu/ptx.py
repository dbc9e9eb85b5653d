"""Kernels of older architectures on this GPU: their PTX, which the driver compiles as it loads it.

An H200 runs no machine code for sm_80. It runs what that is made of, Triton's PTX for the target sm_80 and
NVRTC's for compute_80. Engines hold machine code alone; here PTX takes its place in their files.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

from pelton.builder import cubins
from pelton.builder.cubins import Cubin
from pelton.engine.resources import cores
from pelton.errors import PeltonError
from pelton.kernels.gpu import nvrtc
from pelton.kernels.gpu.driver import Device
from pelton.kernels.launch import Source


@contextmanager
def a_gpu_of(sm: int) -> Iterator[None]:
    """While this is open, the GPU says that it is of compute capability ``sm``, and builds make PTX."""
    begin = Device.__init__

    def older(self: Device, *arguments: Any) -> None:
        begin(self, *arguments)
        assert self.sm >= sm, "PTX is for this architecture and later ones"
        self.sm = sm

    with (
        mock.patch.object(Device, "__init__", older),
        mock.patch.object(cubins, "compile_all", ptx_of_all),
    ):
        yield


def ptx_of_all(sources: Sequence[Source], sm: int) -> list[Cubin | PeltonError]:
    """As ``cubins.compile_all``."""
    workers = max(1, min(cores(), len(sources)))
    with ThreadPoolExecutor(workers) as pool:
        done = list(pool.map(lambda i: _elsewhere(list(sources[i::workers]), sm), range(workers)))
    return [done[i % workers][i // workers] for i in range(len(sources))]


def _elsewhere(sources: list[Source], sm: int) -> list[Cubin | PeltonError]:
    """In a process of its own, in which Triton and NVRTC give their PTX for machine code."""
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"from {__name__} import work; work()"],
        input=pickle.dumps((sources, sm)),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        check=True,
    )
    result: list[Cubin | PeltonError] = pickle.loads(child.stdout)
    return result


def work() -> None:
    """The other process."""
    import triton

    machine_code, cuda = triton.compile, nvrtc.compile_file

    def ptx(*arguments: Any, **options: Any) -> Any:
        compiled = machine_code(*arguments, **options)
        compiled.asm["cubin"] = compiled.asm["ptx"].encode()
        return compiled

    with (
        mock.patch.object(triton, "compile", ptx),
        mock.patch.object(nvrtc, "compile_file", lambda f, sm, c: cuda(f, sm.replace("sm_", "compute_"), c)),
    ):
        cubins.work()
