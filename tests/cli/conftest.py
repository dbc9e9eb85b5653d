"""Running the command line in this process and in another."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pelton.serving.cli.main import run_command
from tests.serving.fake_engine import open_fake, write_fake_engine


@dataclass(frozen=True)
class Result:
    """What a command did."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture(scope="session")
def fake_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fake engine directory with a chat template."""
    return write_fake_engine(tmp_path_factory.mktemp("cli") / "fake.engine")


@pytest.fixture(scope="session")
def plain_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One without a chat template."""
    return write_fake_engine(tmp_path_factory.mktemp("cli") / "plain.engine", chat_template=False)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``run("inspect", engine, stdin=...)`` in this process, with fake sessions."""
    monkeypatch.setattr("pelton.engine.session.Session", open_fake)

    def command(*args: object, stdin: str | None = None, tty: bool = False) -> Result:
        class Stdin(io.StringIO):
            def isatty(self) -> bool:
                return tty

        monkeypatch.setattr(sys, "stdin", Stdin(stdin or ""))
        code = run_command([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return command


#: Runs the command line with fake sessions: for tests that need a process.
FAKE_MAIN = """
import sys
import pelton.engine.session
from tests.serving.fake_engine import open_fake
pelton.engine.session.Session = open_fake
from pelton.serving.cli.main import main
main()
"""


def fake_pelton(*args: object, program: str = FAKE_MAIN, **options: Any) -> subprocess.Popen[str]:
    """Start ``pelton args`` with fake sessions in a process of its own."""
    env = options.pop("env", dict(os.environ)) | {
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, args)],
        stdin=options.pop("stdin", subprocess.DEVNULL),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        **options,
    )


@pytest.fixture(scope="session")
def text_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random engine with a tokenizer; real sessions run it (use ``pelton``, not ``run``)."""
    from tests.cli.text_engine import build_text_engine

    return build_text_engine(tmp_path_factory.mktemp("cli") / "text.engine")


@pytest.fixture
def pelton(capsys: pytest.CaptureFixture[str]) -> Run:
    """``pelton("inspect", engine)`` in this process, with real sessions."""

    def command(*args: object) -> Result:
        code = run_command([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return command
