"""Tactics from outside Pelton at run time: Python functions imported, C libraries of the engine opened.

Only for an engine whose maker one trusts: the session checks that before.
"""

from __future__ import annotations

import ctypes
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pelton.engine.plan import ExternalTactic, Instruction, Plan
from pelton.errors import EngineError, TacticError
from pelton.kernels.host import HostKernel, import_function

LIBRARY_KERNEL = "external.library"


class Externals:
    """What ``plan.external`` names, ready to call; ``folder``: the engine's.

    Raises ``EngineError`` for a package that is not installed or a library that cannot be opened.
    """

    def __init__(self, plan: Plan, folder: Path | None) -> None:
        self._tactics = plan.external
        self._folder = folder
        self._libraries: dict[str, ctypes.CDLL] = {}
        self._functions: dict[str, Callable[..., Any]] = {}
        self._hosts: list[tuple[HostKernel, Instruction, str]] = []

    def __contains__(self, name: str) -> bool:
        return name in self._tactics

    def resolve(self, name: str, instruction: Instruction) -> tuple[str, int]:
        """(kernel of the native library, function that it calls) for one instruction's tactic."""
        tactic = self._tactics[name]
        if tactic.kind == "library":
            return LIBRARY_KERNEL, self._symbol(tactic)
        if name not in self._functions:
            _check_version(tactic)
            self._functions[name] = import_function(tactic.function, tactic.package, tactic.version)
        host = HostKernel(self._functions[name], tactic.tensors, instruction.attrs)
        self._hosts.append((host, instruction, name))
        return HostKernel.kernel, host.address

    def raise_error(self) -> None:
        """Raise ``TacticError`` for the Python function that ended the last step."""
        for host, instruction, name in self._hosts:
            error, host.error = host.error, None
            if error is not None:
                if not isinstance(error, Exception):  # an interrupt is the caller's
                    raise error
                tactic = self._tactics[name]
                raise TacticError(
                    f"{instruction.name} ({instruction.op}): the Python tactic {tactic.function} failed: "
                    f"{type(error).__name__}: {error}"
                ) from error

    def _symbol(self, tactic: ExternalTactic) -> int:
        path = Path(tactic.file) if self._folder is None else self._inside(tactic.file)
        try:
            if tactic.file not in self._libraries:
                self._libraries[tactic.file] = ctypes.CDLL(str(path))
            function = getattr(self._libraries[tactic.file], tactic.function)
        except (OSError, AttributeError) as error:
            raise EngineError(
                f"the engine's compiled code cannot be used here ({error}); rebuild it"
            ) from error
        return int(ctypes.cast(function, ctypes.c_void_p).value or 0)

    def _inside(self, file: str) -> Path:
        """The engine's file; a plan names no other, for what is trusted is the engine."""
        assert self._folder is not None
        if not re.fullmatch(r"compiled/[\w.-]+", file):
            raise EngineError(f"{self._folder} is damaged: its plan wants code from {file!r}; rebuild it")
        return self._folder / file


def _check_version(tactic: ExternalTactic) -> None:
    if not tactic.package:
        return
    import importlib.metadata  # 20 ms that most engines do without

    try:
        found = importlib.metadata.version(tactic.package)
    except importlib.metadata.PackageNotFoundError:
        return  # importing says what is missing
    if found != tactic.version:
        warnings.warn(
            f"the engine was built with {tactic.package} {tactic.version}, and {found} is installed: "
            f"{tactic.function} may compute something else",
            stacklevel=2,
        )
