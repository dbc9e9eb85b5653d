"""A kernel that every engine carries besides its plan's, with its arguments by position."""

from __future__ import annotations

import ctypes as C
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pelton.engine.cuda.code import Code
from pelton.errors import EngineError
from pelton.kernels.gpu.driver import Function, LaunchConfig, Stream, dependent_launch, launch


class EngineKernel:
    """Kernel ``name`` of ``Code.step_kernels``."""

    def __init__(self, code: Code, root: Path, name: str) -> None:
        kernel = code.kernels[code.step_kernels[name]]
        self._function = Function((root / kernel.file).read_bytes(), kernel.name, kernel.shared)
        self._name, self._scratch = name, kernel.scratch
        self._sizes = self._function.parameter_sizes()
        self._config = LaunchConfig()
        self._config.block[:] = (kernel.threads, 1, 1)
        self._config.shared = kernel.shared
        self._launched: tuple[int, int, Stream] | None = None
        self._dependent = dependent_launch() if name in code.dependent else None

    def bind(self, values: Sequence[Any]) -> None:
        """Its arguments: C numbers, read at each launch. Raises ``EngineError`` where it takes others."""
        self._values = [*values, *(C.c_uint64(0) for _ in range(self._scratch))]
        sizes = list(map(C.sizeof, self._values))
        if self._sizes is not None and sizes != self._sizes:  # the driver would read beyond what it was given
            raise EngineError(
                f"the engine's kernel {self._name} takes arguments of {self._sizes} bytes, and this Pelton "
                f"has {sizes}; rebuild the engine"
            )
        self._parameters = (C.c_void_p * len(self._values))(*map(C.addressof, self._values))

    def run(self, stream: Stream, programs: int, more: int = 1, *, dependent: bool = False) -> None:
        """Launch ``programs`` x ``more`` of them; ``dependent``: while the kernel before runs, if it can."""
        if self._launched != (programs, more, stream):  # as a rule it is as in the step before
            self._config.grid[:] = (programs, more, 1)
            self._config.stream = stream.handle
            self._launched = programs, more, stream
        if dependent and self._dependent is not None:
            self._config.attributes, self._config.n_attributes = C.pointer(self._dependent), 1
            launch(self._config, self._function.handle, self._parameters)
            self._config.n_attributes = 0
            return
        launch(self._config, self._function.handle, self._parameters)

    def close(self) -> None:
        self._function.close()
