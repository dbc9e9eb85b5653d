"""Engines for GPUs that this machine does not have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pelton.builder.target import resolve_target
from pelton.engine.session import Session
from pelton.errors import EngineError, MissingDependencyError
from pelton.kernels.gpu import driver
from pelton.kernels.gpu.null import null_gpu
from tests.builder.paper_gpu import build_paper_engine


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No libcuda, whatever machine this is."""

    load = driver.C.CDLL

    def all_others(name: str | None, *args: Any) -> Any:
        if name and name.startswith("libcuda"):
            raise OSError(f"{name}: no such file")
        return load(name, *args)

    driver.library.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(driver.C, "CDLL", all_others)
        yield
    driver.library.cache_clear()


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


def test_without_a_gpu_the_report_says_that_kernels_were_not_run(no_driver: None, tmp_path: Path) -> None:
    engine = build_paper_engine(tmp_path / "h200.engine", check=True)
    assert "the kernels for sm_90 were compiled, and not run: there is no GPU here" in notes(engine)


def test_a_machine_without_a_gpu_builds_for_one_and_says_why_it_does_not_run(
    no_driver: None, tmp_path: Path
) -> None:
    notes: list[str] = []
    assert resolve_target("cuda", notes) == "sm_90"
    assert notes == ["there is no GPU here: target cuda is sm_90; name another as sm_NN"]
    engine = build_paper_engine(tmp_path / "h200.engine")
    with pytest.raises(MissingDependencyError, match="run the engine on a machine with an NVIDIA GPU, or b"):
        Session(engine)
