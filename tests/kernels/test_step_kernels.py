"""What engines and the host that runs them agree on, although no field of an engine says it."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import pytest

from pelton.engine.cuda.code import STEP_KERNELS
from pelton.kernels import step_kernels
from pelton.kernels.launch import KernelSource
from pelton.kernels.step_kernels import interface, parameters, step_sources

VOCAB = 300


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the kernels' files, which are read there."""
    copy = tmp_path / "pelton" / "kernels"
    for folder in ("stage", "sampling"):
        shutil.copytree(step_kernels.KERNELS / folder, copy / folder, ignore=shutil.ignore_patterns("*.pyc"))
    monkeypatch.setattr(step_kernels, "KERNELS", copy)
    return copy


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("stage/stage.cu", "int* inputs, const int* sampled", "const int* sampled, int* inputs"),
        ("stage/stage.cu", "int n, int ids", "int ids, int n"),
        (
            "sampling/sample.cu",
            "const float* top_p, const float* min_p",
            "const float* min_p, const float* top_p",
        ),
        ("sampling/sample.cu", "Piece* pieces, u64* lists", "u64* lists, Piece* pieces"),
        ("sampling/triton_edit.py", "(counts, pairs, n, sampled,", "(pairs, counts, n, sampled,"),
        ("sampling/triton_edit.py", "ids, values, lengths", "values, ids, lengths"),
    ],
)
def test_arguments_in_another_order_are_another_interface(
    file: str, before: str, after: str, sources: Path
) -> None:
    """They are of the same sizes, so that nothing else would tell."""
    first = interface(VOCAB)
    text = (sources / file).read_text()
    assert before in text
    (sources / file).write_text(text.replace(before, after))
    assert interface(VOCAB) != first


def test_bodies_are_none_of_it(sources: Path) -> None:
    """A kernel that does the same in another way runs in the engines that have the old one."""
    first = interface(VOCAB)
    for file in sources.rglob("*.*"):
        text = file.read_text()
        text = text.replace("const int count = packed[0];", "const int count = *packed;")
        comment = "//" if file.suffix in (".cu", ".cuh") else "#"
        file.write_text(f"{text}\n{comment} the end\n")
    assert interface(VOCAB) == first


def test_sizes_that_the_host_takes_for_granted_are_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {interface(VOCAB), interface(VOCAB + 1000)}
    for name in ("HEADER", "SEGMENTS", "LIST_ROOM", "MOST_LOGPROBS", "COUNTER_BYTES", "SWIZZLE"):
        with monkeypatch.context() as patch:
            patch.setattr(step_kernels, name, 7)
            found.add(interface(VOCAB))
    assert len(found) == 8


def test_they_are_the_step_kernels_with_their_parameters() -> None:
    assert step_sources(VOCAB).keys() == STEP_KERNELS
    assert all(parameters(source) for source in step_sources(VOCAB).values())


def test_parameters_of_triton_kernels_are_those_it_compiles() -> None:
    pytest.importorskip("triton")
    for source in step_sources(VOCAB).values():
        if isinstance(source, KernelSource):
            kernel = getattr(importlib.import_module(source.module), source.function)
            types = dict(source.types)
            wanted = [f"{types.get(name, 'constexpr')} {name}" for name in kernel.arg_names]
            assert list(parameters(source)) == wanted
            assert {p.split()[1] for p in wanted if p.startswith("constexpr")} == dict(
                source.constants
            ).keys()
