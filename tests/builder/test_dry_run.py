"""A dry run says what a build would do: no tensor is read, no file is written."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pelton.builder.build import build
from pelton.engine.config import BuildConfig
from pelton.errors import ConfigError
from pelton.models.checkpoint.hf import HFCheckpoint
from pelton.models.checkpoint.safetensors_file import SafetensorsFile
from tests.builder.random_checkpoint import TINY_LLAMA, RandomCheckpoint
from tests.builder.streaming_build import write_checkpoint

SMALL = BuildConfig(max_batch_size=2, max_seq_len=48, max_num_tokens=24, timing=False)


@pytest.mark.parametrize("quant", ["float32", "bfloat16", "q4_1"])
def test_a_dry_run_reports_what_the_build_reports(tmp_path: Path, quant: str) -> None:
    made = RandomCheckpoint(TINY_LLAMA, quant=quant)
    planned = build(made, SMALL, output=tmp_path / "e", dry_run=True)
    assert list(tmp_path.iterdir()) == []
    built = build(made, SMALL, output=tmp_path / "e")
    assert planned.machine is not None and built.machine is not None
    assert msgspec.structs.replace(built, quality=None, machine=None) == msgspec.structs.replace(
        planned, machine=None
    )
    assert planned.machine.kv == built.machine.kv
    assert planned.machine.engine_bytes <= built.machine.engine_bytes
    assert planned.machine.expected_seconds > 0 and not built.machine.expected_seconds
    assert "nothing was written" in planned.text()
    assert "not checked" not in planned.text()


def test_what_would_be_timed_is_not_timed_but_counted(tmp_path: Path) -> None:
    made, config = RandomCheckpoint(TINY_LLAMA, quant="q4_1"), msgspec.structs.replace(SMALL, timing=True)
    times = tmp_path / "times.json"
    report = build(made, config, output=tmp_path / "e", dry_run=True, timing_cache=times)
    assert report.machine is not None and report.machine.timed == 0
    assert "kinds of calls would be timed" in report.text()
    assert list(tmp_path.iterdir()) == []
    build(made, config, output=tmp_path / "e", timing_cache=times)
    again = build(made, config, output=tmp_path / "e", dry_run=True, timing_cache=times)
    assert "would be timed" not in again.text()


@pytest.mark.parametrize("tied", [True, False])
def test_no_tensor_is_read_and_no_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    (tmp_path / "checkpoint").mkdir()
    write_checkpoint(tmp_path / "checkpoint", TINY_LLAMA | {"tie_word_embeddings": tied})
    monkeypatch.chdir(tmp_path)

    def read(self: Any, name: str) -> Any:
        raise AssertionError(f"{name} is read")

    monkeypatch.setattr(SafetensorsFile, "bytes_of", read)
    monkeypatch.setattr(HFCheckpoint, "read", read)
    written: list[object] = []
    watching = [True]

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if not watching[0]:
            return
        if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            written.append(arguments[0])
        if event in ("os.mkdir", "os.rename", "os.link", "os.symlink"):
            written.append((event, arguments))

    sys.addaudithook(audit)
    try:
        report = build("checkpoint", SMALL, output="engine", dry_run=True)
    finally:
        watching[0] = False
    assert [w for w in written if "__pycache__" not in str(w)] == []
    assert sorted(os.listdir()) == ["checkpoint"]
    assert report.memory.weights > 0
    assert ("share_embedding was not tried" in report.text()) == (not tied)
    with pytest.raises(AssertionError, match="is read"):
        build("checkpoint", SMALL, output="engine")


def test_a_head_that_repeats_the_tied_embedding_is_not_compared(tmp_path: Path) -> None:
    made = RandomCheckpoint(TINY_LLAMA)
    table = made.tensors["model.embed_tokens.weight"]
    made.tensors = {**made.tensors, "lm_head.weight": replace(table, name="lm_head.weight")}
    report = build(made, SMALL, output=tmp_path / "e", dry_run=True)
    assert "whatever its values, which are not read" in "".join(report.notes)


def test_what_would_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pelton.builder.budget.available_memory", lambda: 100_000)
    with pytest.raises(ConfigError, match=r"tiny needs .* are free"):
        build(RandomCheckpoint(TINY_LLAMA), SMALL, output=tmp_path / "e", dry_run=True)
    assert list(tmp_path.iterdir()) == []
