"""``pelton profile`` and ``pelton debug`` of engines for GPUs, on a GPU that computes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pelton.engine.artifact import open_engine
from pelton.kernels.gpu import cublaslt, roofline
from pelton.kernels.gpu.null import NullLibrary, null_gpu
from tests.builder.paper_gpu import build_paper_engine
from tests.cli.conftest import Run

MILLISECONDS = 0.5


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_paper_engine(tmp_path_factory.mktemp("gpu") / "paper.engine")


@pytest.fixture
def gpu() -> Iterator[NullLibrary]:
    """A null GPU on which the time between two events is always ``MILLISECONDS``."""

    def elapsed(value: Any, start: Any, end: Any) -> int:
        value._obj.value = MILLISECONDS
        return 0

    with null_gpu() as null:
        null.cuEventElapsedTime = elapsed  # type: ignore[method-assign]
        yield null


def test_a_profile_times_each_instruction_by_the_gpu_s_clock(
    pelton: Run, engine: Path, gpu: NullLibrary, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    done = pelton(
        "profile", engine, "--prompt-len", 20, "--batch-size", 3, "--steps", 2, "--trace", trace, "--json"
    )
    assert done.code == 0, done.err
    record = json.loads(done.out)
    assert record["machine"]["gpu"] == "null"
    assert record["machine"]["dtype"] == "bfloat16"
    # Two copies of a gigabyte, read and written, in half a millisecond.
    assert record["machine"]["read_bytes_per_second"] == pytest.approx(2 * 2**30 / (MILLISECONDS / 1e3))
    plan = open_engine(engine).plan
    for phase, tokens in zip(record["phases"], (60, 3), strict=True):
        assert phase["tokens"] == tokens
        assert all(row["ms"] == pytest.approx(MILLISECONDS) for row in phase["instructions"])
        assert [row["name"] for row in phase["instructions"]] == [i.name for i in plan.instructions]
        assert all(row["tactic"].startswith("cuda.") for row in phase["instructions"])
        assert sum(row["share"] for row in phase["ops"]) == pytest.approx(1)
        # Of 60 tokens three want logits: the last product is one of few rows.
        (shown,) = (row["tactic"] for row in phase["instructions"] if "lm_head" in row["name"])
        (head,) = (i for i in plan.instructions if "lm_head" in i.name)
        few, many = (next(c.tactic for c in head.tactics if n <= c.max_tokens) for n in (3, 60))
        assert shown == few != many
    instructions = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("tid") == 2]
    assert sum(e["name"] != "host" and e["ph"] == "X" for e in instructions) == 3 * len(plan.instructions)
    text = pelton("profile", engine, "--steps", 1).out
    assert "null. It moves 4295 GB/s and does" in text
    assert "% read" in text


def test_threads_are_not_for_gpus(pelton: Run, engine: Path, gpu: NullLibrary) -> None:
    done = pelton("profile", engine, "--threads", 2)
    assert done.code == 2
    assert "--threads is for engines for CPUs" in done.err


def test_debug_shows_tensors_and_compares_them_caches_too(
    pelton: Run, engine: Path, gpu: NullLibrary
) -> None:
    listed = pelton("debug", engine, "--list", "--json")
    names = [row["name"] for row in json.loads(listed.out)]
    shown = pelton("debug", engine, "--tensor", names[1], "--prompt", "Hello")
    assert shown.code == 0, shown.err
    compared = pelton("debug", engine, "--against", "reference", "--prompt", "Hello", "--all")
    # Nothing is computed here, so the first instruction is wrong, and its words are right.
    assert compared.code == 1
    assert "(cuda) against the reference" in compared.out
    assert "First to depart: model.embed_tokens.embedding" in compared.out
    assert "k_cache.1" in compared.out
    assert "0 of each step without a counterpart" in compared.out


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8"])
def test_debug_reads_caches_of_any_type(pelton: Run, gpu: NullLibrary, tmp_path: Path, kv_dtype: str) -> None:
    path = build_paper_engine(tmp_path / "paper.engine", kv_dtype=kv_dtype)
    done = pelton("debug", path, "--against", "reference", "--prompt", "Hello")
    assert "First to depart: model.embed_tokens.embedding" in done.out, done.err


def test_doctor_measures_the_gpu(pelton: Run, gpu: NullLibrary) -> None:
    said = pelton("doctor").out
    assert "null, sm_90, " in said
    assert "gpu rates       4295 GB/s, " in said


def test_doctor_says_how_to_get_cublaslt(
    pelton: Run, gpu: NullLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cublaslt, "available", lambda: False)
    rates = roofline.GpuRates(name="null", memory=1e12, matrix=1e14, dtype="bfloat16")
    monkeypatch.setattr(roofline, "measure", lambda *_: rates)
    assert ", no cuBLASLt: pip install nvidia-cublas\n" in pelton("doctor").out


def test_a_share_that_is_too_small_is_one_sentence(pelton: Run, engine: Path, gpu: NullLibrary) -> None:
    done = pelton("run", engine, "Hi", "--gpu-memory-fraction", "0.0001")
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert "for weights and work; " in done.err
    assert "are free on null, of which 0% may be used" in done.err
