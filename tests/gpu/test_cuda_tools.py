"""``pelton profile`` and ``pelton debug`` of an engine on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pelton.serving.cli.main import run_command

pytestmark = pytest.mark.gpu
CAPTURE = pytest.CaptureFixture[str]


@pytest.fixture
def spoken(engine: tuple[Path, str]) -> Path:
    """An engine with a tokenizer."""
    pytest.importorskip("tokenizers", reason="prompts need a tokenizer")
    return engine[0]


def test_a_profile_has_every_instruction_s_time_and_share(spoken: Path, capsys: CAPTURE) -> None:
    assert run_command(["profile", str(spoken), "--prompt-len", "200", "--steps", "4", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["machine"]["read_bytes_per_second"] > 1e11
    assert record["machine"]["matrix_operations_per_second"] > 1e12
    for phase in record["phases"]:
        assert sum(row["share"] for row in phase["ops"]) == pytest.approx(1)
        assert all(0 < row["ms"] < 10 for row in phase["instructions"])
        assert phase["ms_instructions"] < 50
    assert run_command(["profile", str(spoken), "--steps", "2"]) == 0
    assert "It moves" in capsys.readouterr().out


def test_no_instruction_departs_from_the_reference(spoken: Path, capsys: CAPTURE) -> None:
    code = run_command(["debug", str(spoken), "--against", "reference", "--prompt", "Why is the sky blue?"])
    said = capsys.readouterr().out
    assert code == 0, said
    assert "0 of each step without a counterpart" in said
