"""Code in an engine runs where it was built, or where the user says so; nowhere else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import pelton
from pelton.builder.refit import refit
from pelton.engine.artifact import file_sha256, open_engine
from pelton.engine.session import Session
from pelton.engine.trust import check_trust, is_trusted, remember
from pelton.errors import EngineError
from pelton.serving.cli.main import run_command
from tests.builder.random_checkpoint import TINY_LLAMA, RandomCheckpoint


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PELTON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def engine(tiny_engine: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "copy.engine"
    shutil.copytree(tiny_engine, copy)
    return copy


def with_library(engine: Path) -> str:
    (engine / "compiled").mkdir()
    path = engine / "compiled" / "swish.so"
    path.write_bytes(b"\x7fELF")
    manifest = json.loads((engine / "manifest.json").read_text())
    manifest["files"].append({"path": "compiled/swish.so", "nbytes": 4, "sha256": file_sha256(path)})
    (engine / "manifest.json").write_text(json.dumps(manifest))
    return "compiled/swish.so"


def with_python(engine: Path, tactic: dict[str, str] | None = None) -> str:
    path = engine / "plan.json"
    plan = json.loads(path.read_text())
    plan["instructions"][0]["tactics"] = [{"max_tokens": 40, "tactic": "mine"}]
    plan["external"] = {"mine": tactic or {"kind": "python", "function": "os:system"}}
    path.write_text(json.dumps(plan))
    manifest = json.loads((engine / "manifest.json").read_text())
    entry = next(f for f in manifest["files"] if f["path"] == "plan.json")
    entry["nbytes"], entry["sha256"] = path.stat().st_size, file_sha256(path)
    (engine / "manifest.json").write_text(json.dumps(manifest))
    return "os:system"


@pytest.mark.parametrize("add", [with_library, with_python])
def test_code_of_others_is_refused_until_it_is_trusted(engine: Path, add: Callable[[Path], str]) -> None:
    what = add(engine)
    opened = open_engine(engine)
    assert opened.code == [what]
    sentence = rf"carries code \({what}\) and was not built here; if you trust .* run it with --trust"
    for load in (Session, pelton.LLM):
        with pytest.raises(EngineError, match=sentence):
            load(engine)
    check_trust(opened, trust=True)
    remember(opened)
    check_trust(opened, trust=False)


@pytest.mark.parametrize("file", ["/tmp/evil.so", "../evil.so", "tokenizer/tokenizer.json"])
def test_a_library_that_is_no_part_of_the_engine_is_refused(engine: Path, file: str) -> None:
    with_python(engine, {"kind": "library", "function": "f", "file": file})
    with pytest.raises(EngineError, match=r"is damaged: plan.json: the tactic mine is in .*, no file of the"):
        open_engine(engine)


def test_trust_is_of_these_bytes_and_follows_a_refit(engine: Path, cache: Path) -> None:
    with_library(engine)
    remember(open_engine(engine))
    refit(engine, RandomCheckpoint(TINY_LLAMA, seed=3))
    assert is_trusted(open_engine(engine))
    assert len(list((cache / "trusted").iterdir())) == 2
    (engine / "compiled" / "swish.so").write_bytes(b"evil")
    manifest = (engine / "manifest.json").read_text()
    (engine / "manifest.json").write_text(manifest + " ")
    assert not is_trusted(open_engine(engine))


def test_an_engine_without_code_needs_no_trust_and_leaves_no_trace(engine: Path, cache: Path) -> None:
    remember(open_engine(engine))
    assert is_trusted(open_engine(engine))
    assert not cache.exists()


def test_the_command_says_how_to_trust(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_library(engine)
    assert run_command(["run", str(engine), "Hi"]) == 2
    assert "run it with --trust" in capsys.readouterr().err
