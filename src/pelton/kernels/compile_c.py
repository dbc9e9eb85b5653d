"""C kernels from outside Pelton: compiled when an engine is built, into a library that it carries.

The same source gives the same bytes: no paths, dates or debugging information are in it.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from pelton.errors import BuildError, MissingDependencyError

INCLUDE = Path(__file__).with_name("include")
FLAGS = (
    "-O3",
    "-std=c11",
    "-fPIC",
    "-shared",
    "-fvisibility=default",
    "-ffp-contract=off",
    "-Wl,--build-id=none",
)
#: What every CPU level above the baseline has.
AVX2 = ("-mavx2", "-mfma", "-mf16c")


def compiler() -> str:
    """The C compiler: $CC, or the first of cc, gcc, clang. Raises ``MissingDependencyError``."""
    for name in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        if found := shutil.which(name):
            return found
    raise MissingDependencyError(
        "there is no C compiler on this machine; install one (apt install gcc), or name it in $CC"
    )


@functools.cache
def build_folder() -> Path:
    """Where this process compiles; removed when it ends."""
    folder = tempfile.mkdtemp(prefix="pelton-compiled-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def compile_c(source: str, folder: Path, *, cpu_level: str, label: str) -> Path:
    """The library of ``source`` in ``folder``, named after what is in it; compiled unless it is there.

    ``cpu_level``: instructions it may use. Raises ``BuildError`` with the compiler's first error, and
    ``MissingDependencyError`` where there is no compiler.
    """
    flags = FLAGS if cpu_level in ("generic", "any") else (*FLAGS, *AVX2)
    key = hashlib.sha256("\0".join((source, *flags)).encode()).hexdigest()[:16]
    path = folder / f"{key}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    command = [compiler(), *flags, f"-I{INCLUDE}", "-x", "c", "-", "-o", str(path), "-lm"]
    run = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    if run.returncode or not path.exists():
        lines = [line.strip() for line in run.stderr.splitlines() if line.strip()]
        error = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
        raise BuildError(f"the C source of {label} does not compile: {error.replace('<stdin>', 'line')}")
    return path
