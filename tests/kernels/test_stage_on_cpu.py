"""The kernel that lays inputs out (``stage.cu``), emulated on a CPU; see also ``tests/gpu``."""

from __future__ import annotations

import shutil

import pytest
from tests.kernels.stage_reference import on_cpu, stage_cases


@pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++")
def test_inputs_are_laid_out() -> None:
    assert stage_cases(on_cpu())
