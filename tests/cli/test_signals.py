"""Signals end a command as a whole: nothing half-made stays, a sentence or none, the shell's exit code."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from pelton.builder.quantize_state import QuantizeState
from pelton.serving.cli.main import run_command
from tests.cli.conftest import fake_pelton
from tests.cli.test_quantize import SHORT, folder

SAID = "pelton: ended by SIGTERM before it was done.\n"

#: ``stall()`` says so and waits to be ended.
STALL = """
import sys, time

def stall(*args, **options):
    print("stalled", flush=True)
    time.sleep(60)
"""
MAIN = "from pelton.__main__ import main\nmain()\n"


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    found = process.stdout.readline()
    if found != line + "\n":
        process.kill()
        raise AssertionError(f"{found!r}, {process.communicate()}")


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_still_being_imported_ends_without_a_word(number: int, tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text(STALL + "stall()")
    program = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n" + MAIN
    with fake_pelton("version", program=program) as process:
        wait_for(process, "stalled")
        process.send_signal(number)
        assert process.communicate(timeout=20) == ("", "")
        assert process.returncode == 128 + number


def test_signals_that_the_caller_ignores_are_ignored(tmp_path: Path) -> None:
    ignored = "import signal\nfor n in 2, 15: signal.signal(n, signal.SIG_IGN)\n"
    report = "import click, signal\nprint([signal.getsignal(n) == signal.SIG_IGN for n in (2, 15)])\n"
    (tmp_path / "sitecustomize.py").write_text(ignored)
    (tmp_path / "doctor.py").write_text(report + "version = click.Command('version')\n")
    patch = "import pelton.serving.cli.main as m\nm.COMMANDS['version'] = ('doctor', '')\n"
    program = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n" + ignored + patch + MAIN
    with fake_pelton("version", program=program) as process:
        out, err = process.communicate(timeout=20)
    assert (out, err, process.returncode) == ("[True, True]\n", "", 0)


def test_sigterm_removes_what_is_half_made(fake_engine: Path, tmp_path: Path) -> None:
    """Also where it comes twice, as from timeout(1): the second time while what was made is removed."""
    slow = """
import shutil
remove = shutil.rmtree

def slow(*args, **options):
    print("removing", flush=True)
    time.sleep(0.1)
    remove(*args, **options)

shutil.copyfile, shutil.rmtree = stall, slow
"""
    with fake_pelton("strip", fake_engine, "-o", tmp_path / "small", program=STALL + slow + MAIN) as process:
        wait_for(process, "stalled")
        assert [name.startswith(".small.building-") for name in names(tmp_path)] == [True]
        process.send_signal(signal.SIGTERM)
        wait_for(process, "removing")
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=20) == ("", SAID)
        assert process.returncode == 143
    assert names(tmp_path) == []


def test_sigterm_ends_an_answer(fake_engine: Path) -> None:
    env = dict(os.environ) | {"FAKE_STEP_SECONDS": "0.05"}
    with fake_pelton("run", fake_engine, "Hello", "--max-tokens", 200, env=env) as process:
        assert process.stdout is not None
        process.stdout.read(3)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
        assert (process.returncode, err) == (143, SAID)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_ended_build_leaves_nothing(number: int, tmp_path: Path) -> None:
    """It quantises first, so that it has two hidden folders when it comes to the weights."""
    source = folder(tmp_path / "model")
    patch = "import pelton.builder.build\npelton.builder.build.write_weights = stall\n"
    command = ("build", source, "-o", tmp_path / "e", "--quant", "gptq-int4", "-q")
    with fake_pelton(*command, program=STALL + patch + MAIN) as process:
        wait_for(process, "stalled")
        assert len(names(tmp_path)) == 3
        process.send_signal(number)
        assert process.communicate(timeout=60) == ("", SAID if number == signal.SIGTERM else "")
        assert process.returncode == 128 + number
    assert names(tmp_path) == ["model"]


@pytest.mark.slow
def test_an_ended_quantize_keeps_the_layers_that_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = folder(tmp_path / "model"), tmp_path / "small"
    patch = """
from pelton.builder.quantize_state import QuantizeState
save = QuantizeState.save
QuantizeState.save = lambda self, index, layer: stall() if index == 2 else save(self, index, layer)
"""
    command = ("quantize", source, "--recipe", "gptq-int4", "-o", out, "-q", *SHORT)
    with fake_pelton(*command, program=STALL + patch + MAIN) as process:
        wait_for(process, "stalled")
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60) == ("", SAID)
        assert process.returncode == 143
    assert names(tmp_path) == ["model", "small.partial"]
    done: list[int] = []
    save = QuantizeState.save
    monkeypatch.setattr(
        QuantizeState, "save", lambda self, index, layer: done.append(index) or save(self, index, layer)
    )
    assert run_command(list(map(str, command))) == 0
    assert done == [2, 3, 4], "the others were done"
    assert names(tmp_path) == ["model", "small"]
