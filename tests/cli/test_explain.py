"""``pelton build --explain``: what each pass changes, told as it happens, alike layers once."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from pelton.builder.build import build
from pelton.builder.report import TacticReport
from pelton.engine.artifact import open_engine
from pelton.engine.config import BuildConfig
from pelton.serving.cli.explain import explain_choices, explain_pass
from tests.cli.text_engine import LIMITS, text_checkpoint


def test_a_build_explains_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = build(
        text_checkpoint(lambda name: "q8_0" if "v_proj" in name else "float32"),
        BuildConfig(**LIMITS, passes={"rope_kv_write": "off"}),
        output=tmp_path / "e",
        explain=explain_pass,
    )
    told = capsys.readouterr().out
    changed = [p.name for p in report.passes if p.changed]
    assert re.findall(r"^== (\w+)$", told, flags=re.MULTILINE) == changed
    assert "fuse_gate_mlp" in changed
    mlp = told[told.index("== fuse_gate_mlp") :].split("\n== ")[0]
    removed = [line for line in mlp.splitlines() if line.startswith("-") and "gate_proj" in line]
    assert len(removed) == 1, "four layers change alike and stand once"
    assert "(and 3 like it)" in mlp
    explain_choices(report)
    choices = capsys.readouterr().out
    assert re.search(
        r"fuse_qkv +4 +weight types differ: q_proj float32, k_proj float32, v_proj q8_0", choices
    )
    assert re.search(r"rope_kv_write +all +switched off", choices)
    assert re.search(r"paged_attention .*cpu\.paged_attention", choices)


def test_the_summary_counts_what_passes_left_alone_and_the_engine_says_why(tmp_path: Path) -> None:
    """However many places and reasons: the line of the passes names each pass once."""
    quants = lambda name: "q8_0" if "v_proj" in name else "q4_1" if "proj" in name else "float32"
    config = BuildConfig(**LIMITS, passes={"rope_kv_write": "off"})
    report = build(text_checkpoint(quants), config, output=tmp_path / "e", check=False)
    reasons = {p.name: p.skipped for p in report.passes if p.skipped}
    assert reasons.keys() >= {"fuse_qkv", "explicit_quantise"}
    (line,) = [row for row in report.text().splitlines() if row.startswith("  passes")]
    changed, _, left = line.partition("; left alone: ")
    assert re.findall(r"(\w+) (\d+|off)\b", changed) == [
        (p.name, "off" if p.choice == "off" else str(p.changed))
        for p in report.passes
        if p.changed or p.choice == "off"
    ]
    counts = ", ".join(f"{name} {sum(skipped.values())}" for name, skipped in reasons.items())
    assert left == f"{counts} (--explain says why)"
    stored = {p["name"]: p.get("skipped", {}) for p in open_engine(tmp_path / "e").report()["passes"]}
    assert {name: skipped for name, skipped in stored.items() if skipped} == reasons


def test_times_and_rejections_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = build(text_checkpoint(), BuildConfig(**LIMITS), output=tmp_path / "e", check=False)
    timed = TacticReport(
        op="linear",
        tactic="fast",
        shape="[64]",
        calls=2,
        max_tokens=8,
        reason="timed",
        microseconds={"slow": 9.0, "fast": 3.0},
        rejected={"wrong": "departs from the reference"},
    )
    none = TacticReport(op="odd", tactic="", calls=1)
    explain_choices(msgspec.structs.replace(report, tactics=(timed, none)))
    out = capsys.readouterr().out
    assert "timed; 3.0 us; slow 9.0 us; not wrong: departs from the reference" in out
    assert re.search(r"linear +\[64\] +fast +<= 8 +2", out)
    assert re.search(r"odd +reference +any +1 +no kernel of this machine supports it", out)
