"""Engines for GPUs that this machine does not have."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pelton.engine.session import Session
from pelton.errors import EngineError
from pelton.kernels.gpu.null import null_gpu
from tests.builder.paper_gpu import build_paper_engine


def notes(engine: Path) -> list[str]:
    found: list[str] = msgspec.json.decode((engine / "report.json").read_bytes())["notes"]
    return found


def test_an_engine_for_another_gpu_than_this_machine_s_is_built_and_not_run(tmp_path: Path) -> None:
    with null_gpu():  # of sm_90
        engine = build_paper_engine(tmp_path / "a100.engine", target="sm_80", check=True)
        with pytest.raises(EngineError, match=r"was built for sm_80 GPUs and null is sm_90; "):
            Session(engine)
    (said,) = (note for note in notes(engine) if "not run" in note)
    assert said == "the kernels for sm_80 were compiled, and not run: the GPU (null) is of sm_90 here"


def test_without_a_gpu_the_report_says_that_kernels_were_not_run(tmp_path: Path) -> None:
    engine = build_paper_engine(tmp_path / "h200.engine", check=True)
    assert "the kernels for sm_90 were compiled, and not run: there is no GPU here" in notes(engine)
