"""Tables in a pipe and in a terminal."""

from __future__ import annotations

import sys

import pytest

from pelton.serving.cli.tables import show, table

ROWS = [("linear", "cpu.linear[x16]"), ("add", "cpu.add")]


def test_a_pipe_gets_aligned_text(capsys: pytest.CaptureFixture[str]) -> None:
    show("tactics", ROWS, header=("op", "tactic"))
    assert capsys.readouterr().out == (
        "tactics\n  op      tactic\n  linear  cpu.linear[x16]\n  add     cpu.add\n"
    )


@pytest.mark.parametrize("rich", [True, False])
def test_a_terminal_gets_a_drawn_table_where_rich_is(
    rich: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show("tactics", ROWS, header=("op", "tactic"))
    out = capsys.readouterr().out
    for cell in ("tactics", "op", "linear", "cpu.linear[x16]", "cpu.add"):
        assert cell in out, "square brackets are text, not markup"
    assert (out == table("tactics", ROWS, ("op", "tactic")) + "\n") == (not rich)


def test_an_empty_table_is_its_title() -> None:
    assert table("nothing", []) == "nothing"
