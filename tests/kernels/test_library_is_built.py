"""Tests of native kernels are skipped where there is no library; this one says when there must be one."""

from __future__ import annotations

import shutil

import pytest

from pelton.kernels import native


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler, so no native library")
def test_a_machine_with_a_compiler_has_the_native_library() -> None:
    assert native.available(), "the build failed or was not run (make native): its tests would be skipped"
