"""Every command that runs an engine can be told to trust it, and does not run its code before."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shutil
from pathlib import Path

import pytest

from pelton.engine.artifact import file_sha256
from pelton.kernels import native
from pelton.serving.cli.main import COMMANDS
from tests.cli.conftest import Run

#: Whatever of them can be done shortly; FOREIGN carries code.
RUNNING = {
    "run": "run FOREIGN Hi --max-tokens 1",
    "bench": "bench FOREIGN --rounds 1 --tokens 2 --no-start",
    "profile": "profile FOREIGN --prompt-len 2 --steps 1",
    "debug a tensor": "debug FOREIGN --tensor model.norm.add_rms_norm --prompt Hi",
    "debug": "debug FOREIGN --against reference --prompt Hi --steps 1",
    "debug the other": "debug OWN --against FOREIGN --prompt Hi --steps 1",
    "inspect": "inspect FOREIGN --measure",
    "inspect a page": "inspect FOREIGN --measure --html PAGE",
}


@pytest.fixture(scope="module")
def foreign(text_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy with a library that the plan does not use."""
    engine = tmp_path_factory.mktemp("trust") / "foreign.engine"
    shutil.copytree(text_engine, engine)
    path = engine / "compiled" / "mine.so"
    path.parent.mkdir()
    path.write_bytes(b"\x7fELF")
    manifest = json.loads((engine / "manifest.json").read_text())
    manifest["files"].append({"path": "compiled/mine.so", "nbytes": 4, "sha256": file_sha256(path)})
    (engine / "manifest.json").write_text(json.dumps(manifest))
    return engine


@pytest.mark.skipif(not native.available(), reason="the native library is not built")
@pytest.mark.parametrize("line", RUNNING.values(), ids=RUNNING)
def test_code_runs_with_trust_alone(
    pelton: Run,
    text_engine: Path,
    foreign: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
) -> None:
    monkeypatch.setenv("PELTON_CACHE", str(tmp_path / "cache"))
    paths = {"FOREIGN": foreign, "OWN": text_engine, "PAGE": tmp_path / "page.html"}
    args = [paths.get(word, word) for word in line.split()]
    refused = pelton(*args)
    assert refused.code == 2
    assert "carries code (compiled/mine.so)" in refused.err
    assert "run it with --trust" in refused.err
    trusted = pelton(*args, "--trust")
    assert trusted.code == 0, trusted.err


def test_every_command_that_opens_a_session_has_the_flag(run: Run) -> None:
    opening = {
        name
        for name, (module, _) in COMMANDS.items()
        if re.search(
            r"\b(Session|open_llm|LLM|AsyncLLM|serve_app)\(",
            inspect.getsource(importlib.import_module(module)),
        )
    }
    assert opening >= {"run", "chat", "bench", "profile", "debug", "inspect"}
    for name in opening | {"serve"}:
        assert "--trust " in run(name, "--help").out, name
