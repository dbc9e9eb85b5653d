"""``tools/gpu_sanitizers.py`` around a compute-sanitizer that says what it is told to."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tests.builder.paper_gpu import paper_cubin

from pelton.builder import cubins
from pelton.kernels.gpu.null import null_gpu

TOOL = Path(__file__).parents[2] / "tools" / "gpu_sanitizers.py"

SANITIZER = """#!/bin/bash
for a in "$@"; do
  [ "$before" = "--run" ] && names="$a"; [ "$before" = "--tool" ] && tool="$a"; before="$a"
done
if [ "$names" = "a row too many" ]; then CANARY; fi
IFS=,; code=0
for n in $names; do
  if [ "$n" = cuda.reduce ] && [ "$tool" = racecheck ]; then echo "========= Race reported"; code=86; fi
  echo "CHECKED $n: 4 cases"
done
if [ "$tool" = memcheck ]; then echo "========= ERROR SUMMARY: 0 errors"
else echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"; fi
exit $code
"""


@pytest.fixture
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_sanitizers", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_sanitizers"] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def run(tool: Any, folder: Path, canary: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    script = folder / "sanitizer"
    script.write_text(SANITIZER.replace("CANARY", canary))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "argv", ["gpu_sanitizers", "--sanitizer", str(script), "--jobs", "2", *options])
    with (
        null_gpu(),
        mock.patch.object(cubins, "compile_kernel", paper_cubin),
        mock.patch.object(cubins, "cores", return_value=1),
    ):
        code: int = tool.main()
    return code


def test_a_tactic_that_races_is_named_and_no_other(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tool, tmp_path, "echo ========= Invalid read; exit 86", monkeypatch) == 1
    lines = capsys.readouterr().out.splitlines()
    found = [line for line in lines if "FOUND" in line]
    assert len(found) == 1
    assert found[0].startswith("racecheck cuda.reduce ")
    clean = {tuple(line.split()[:2]) for line in lines if " clean " in line}
    assert ("memcheck", "cuda.reduce") in clean
    assert ("racecheck", "cuda.rms_norm") in clean
    assert ("memcheck", "cuda.linear.cublaslt") in clean
    assert ("racecheck", "cuda.linear.cublaslt") not in clean
    assert {("memcheck", "an"), ("racecheck", "an")} <= clean  # engine


def test_a_sanitizer_that_misses_a_row_too_many_is_not_believed(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tool, tmp_path, "exit 0", monkeypatch, "--only", "cuda.rms_norm") == 2
    assert "does not find an access beyond an allocation" in capsys.readouterr().err


def test_a_part_of_the_tactics_may_be_asked_for(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that take float16 alone, too."""
    assert run(tool, tmp_path, ":", monkeypatch, "--only", "cuda.linear_add.half_sums") == 0
    assert "2 runs, 0 not clean" in capsys.readouterr().out
    monkeypatch.setattr(tool, "chosen_cases", lambda _: {})
    assert run(tool, tmp_path, ":", monkeypatch, "--only", "no such") == 2
    assert "--only no such: no tactic's name" in capsys.readouterr().err
