"""Kernels compiled for GPUs that are not here: shared memory that suffices, failures kept apart."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pelton.builder import cubins
from pelton.builder.build import build
from pelton.builder.cubins import CodeWriter, Cubin, compile_kernel
from pelton.engine.config import BuildConfig
from pelton.errors import BuildError, ConfigError, MissingDependencyError, PeltonError
from pelton.kernels.gpu import nvrtc
from pelton.kernels.launch import KernelSource, LaunchSpec, Source
from tests.builder.random_checkpoint import TINY_LLAMA, RandomCheckpoint

KERNEL = KernelSource(
    module="none", function="tile", types=(), constants=(("BLOCK", 64), ("STAGES", 5)), num_stages=2
)


def fake_compiler(per_stage: int) -> Any:
    """Each load in flight takes ``per_stage`` bytes of shared memory."""

    def compile_triton(source: KernelSource, sm: int) -> Cubin:
        stages = dict(source.constants)["STAGES"]
        assert isinstance(stages, int)
        assert source.num_stages <= max(2, stages)
        return Cubin(image=bytes([stages]), name="tile", threads=128, shared=per_stage * stages)

    return compile_triton


@pytest.mark.parametrize(("sm", "stages"), [(90, 5), (80, 4), (89, 2)])
def test_a_kernel_has_as_many_loads_in_flight_as_shared_memory_holds(
    monkeypatch: pytest.MonkeyPatch, sm: int, stages: int
) -> None:
    monkeypatch.setattr(cubins, "_compile_triton", fake_compiler(40 << 10))
    assert compile_kernel(KERNEL, sm).image == bytes([stages])


def test_a_tile_that_fits_no_shared_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cubins, "_compile_triton", fake_compiler(100 << 10))
    with pytest.raises(BuildError, match="tile wants 102400 bytes of shared memory; sm_89 has 101376"):
        compile_kernel(KERNEL, 89)


def test_what_does_not_compile_is_named_or_raised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bad = dataclasses.replace(KERNEL, function="bad")

    def compile_kernel(source: Source, sm: int) -> Cubin:
        if source == bad:
            raise BuildError("bad does not compile")
        return Cubin(image=b"code", name=source.function, threads=32, shared=0)

    monkeypatch.setattr(cubins, "compile_kernel", compile_kernel)
    monkeypatch.setattr(cubins, "cores", lambda: 1)
    writer = CodeWriter(sm=90, vocab=64)
    for kernel in (KERNEL, bad):
        writer.add({"tactic": ((LaunchSpec(kernel, (), ()),), None)})
    failures: dict[Source, PeltonError] = {}
    code = writer.write(tmp_path / "kept", lambda *_: None, failures)
    assert list(failures) == [bad]
    assert [bool(k.file) for k in code.kernels[:2]] == [True, False]
    with pytest.raises(BuildError, match="bad does not compile"):
        writer.write(tmp_path / "raised", lambda *_: None)


def test_an_interrupted_build_ends_its_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[subprocess.Popen[bytes]] = []

    def sleeper() -> subprocess.Popen[bytes]:
        child = subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        children.append(child)
        return child

    monkeypatch.setattr(cubins, "_compiler", sleeper)
    monkeypatch.setattr(cubins, "cores", lambda: 2)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    before = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        cubins.compile_all([dataclasses.replace(KERNEL, function=f"k{i}") for i in range(8)], 90)
    assert time.monotonic() - before < 30
    assert [child.poll() for child in children] == [-signal.SIGKILL] * 2


# ---- Compilers that are not here ----

GPU = BuildConfig(target="sm_90", quant="gptq-int4")


def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)


def no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc.library.cache_clear()
    monkeypatch.setattr(nvrtc.shared_library, "find", lambda names, package: None)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ([no_triton], r"with Triton, which is not here \(.*\); install it with: pip install triton$"),
        ([no_nvrtc], r"NVRTC, which compiles them, is not here; .*: pip install nvidia-cuda-nvrtc$"),
        ([no_triton, no_nvrtc], r"Triton and NVRTC, and neither is here; .*: pip install 'pelton\[cuda\]'$"),
    ],
    ids=["triton", "nvrtc", "both"],
)
def test_a_compiler_that_is_not_here_is_missed_before_anything_is_read(
    missing: list[Callable[[pytest.MonkeyPatch], None]],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A recipe with calibration would read weights first of all."""
    if no_triton not in missing:
        pytest.importorskip("triton")
    if no_nvrtc not in missing and not nvrtc.available():
        pytest.skip("NVRTC (nvidia-cuda-nvrtc) is not here")
    for take_away in missing:
        take_away(monkeypatch)
    checkpoint, stages = RandomCheckpoint(TINY_LLAMA), []
    monkeypatch.setattr(checkpoint, "read", None)
    with pytest.raises(MissingDependencyError, match=message):
        build(checkpoint, GPU, output=tmp_path / "e", progress=lambda stage, *_: stages.append(stage))
    assert set(stages) <= {"open"}
    assert list(tmp_path.iterdir()) == []
    report = build(checkpoint, GPU, output=tmp_path / "e", dry_run=True)
    assert report.machine is not None and report.machine.expected_seconds > 0, "a dry run compiles nothing"


def test_an_unknown_target_is_refused_before_calibration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown target 'gpu'"):
        build(
            RandomCheckpoint(TINY_LLAMA), BuildConfig(target="gpu", quant="gptq-int4"), output=tmp_path / "e"
        )
