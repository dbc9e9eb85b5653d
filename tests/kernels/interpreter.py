"""Whether Triton's interpreter works here: older ones do not know the newest numpy."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import numpy as np
import pytest

#: From this version on the interpreter is tried before it is trusted; with older ones every failure is ours.
_NEW_NUMPY = (2, 5)

PROBE = """
from pelton.ir.op import get_op
from pelton.kernels import conformance_cuda
conformance_cuda.check(next(conformance_cuda.cases(get_op("rms_norm"), ("float32",))))
"""


@functools.cache
def _failure() -> str:
    """Why the interpreter runs nothing at all; empty where it runs."""
    if tuple(map(int, np.__version__.split(".")[:2])) < _NEW_NUMPY:
        return ""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env=env, check=False)
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""


def skip_where_the_interpreter_fails() -> None:
    """With the reason."""
    if why := _failure():
        import triton

        pytest.skip(f"Triton {triton.__version__}'s interpreter fails with numpy {np.__version__}: {why}")
