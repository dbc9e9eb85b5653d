"""``pelton inspect`` and ``pelton diff``: what an engine is, and what tells two apart."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from pelton.engine.artifact import open_engine
from pelton.engine.memory_monitor import DeclaredMemory
from pelton.engine.plan import producers
from pelton.engine.resources import human_bytes
from pelton.engine.session import Session
from pelton.engine.summary import live_bytes, summarise
from pelton.kernels import native
from tests.cli.conftest import Run
from tests.cli.text_engine import build_text_engine, edit_report, spoil_weight, text_checkpoint

SECTIONS = ("plan", "times", "memory", "weights", "tactics", "passes", "quality", "settings")
VOID = {"meta", "input", "br", "hr", "img", "link"}


class Page(HTMLParser):
    """Checks nesting, and keeps ids, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], "an element is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes <{self.open[-1:]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def page(pelton: Run, engine: Path, folder: Path, *args: object) -> tuple[str, Page]:
    result = pelton("inspect", engine, "--html", folder / "page.html", *args)
    assert (result.code, result.out) == (0, "")
    text = (folder / "page.html").read_text("utf-8")
    return text, Page(text)


def test_the_page_is_whole_and_has_every_section(pelton: Run, text_engine: Path, tmp_path: Path) -> None:
    text, parsed = page(pelton, text_engine, tmp_path)
    assert {*SECTIONS} <= set(parsed.ids)
    assert len(parsed.ids) == len(set(parsed.ids))
    words = " ".join(parsed.words)
    for part in (
        "layers 1 to 2",
        "float32[T, 64]",
        "fuse_qkv",
        "max_error",
        "cpu.paged_attention",
        "text.engine",
    ):
        assert part in words, part
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text), "the page must need nothing from outside"
    assert not {name for name, _ in parsed.attributes} & {"src", "href"}
    assert "prefers-color-scheme: dark" in text
    plan = open_engine(text_engine).plan
    assert text.count("<rect") == 2 * len(plan.instructions) + 4 + len(producers(plan))
    assert "where tensors lie" in words


@pytest.mark.skipif(not native.available(), reason="the native library is not built")
def test_a_measured_page_has_times(pelton: Run, text_engine: Path, tmp_path: Path) -> None:
    text, parsed = page(pelton, text_engine, tmp_path, "--measure")
    words = " ".join(parsed.words)
    assert "prefill: " in words and "decode: " in words and " µs" in text
    assert "bytes read in a decode step" not in words


def test_names_are_escaped(pelton: Run, tmp_path: Path) -> None:
    checkpoint = text_checkpoint()
    checkpoint.name = "<script>alert(1)</script>&"
    engine = build_text_engine(tmp_path / "e.engine", checkpoint)
    text, parsed = page(pelton, engine, tmp_path)
    assert "<script>alert" not in text
    assert "<script>alert(1)</script>&" in " ".join(parsed.words)


def test_tables_say_what_the_engine_is(pelton: Run, text_engine: Path) -> None:
    out = pelton("inspect", text_engine).out
    for part in ("layer 0", "layers 1 to 2", "tactics", "fuse_qkv", "max_error", "alive at once", "float32"):
        assert part in out, part
    assert re.search(r"profiles +T 1:\d+:40, B 1:\d+:4", out)
    assert re.search(r"passes +none\n", out)
    plan = open_engine(text_engine).plan
    lines = pelton("inspect", text_engine, "--plan").out.splitlines()
    assert sum(bool(re.match(r" *\d+ .* = \w+\(", line)) for line in lines) == len(plan.instructions)
    arena = lines[lines.index("arena") + 2 :]
    assert [line.split()[0] for line in arena[: len(producers(plan))]] == [
        plan.buffers[b].name for b in producers(plan)
    ]


def test_what_the_report_has_is_shown(pelton: Run, text_engine: Path, tmp_path: Path) -> None:
    """Times of tactics, a user's choice, and parts that an older engine lacks."""
    engine = tmp_path / "e.engine"
    shutil.copytree(text_engine, engine)
    edit_report(
        engine,
        tactics=[
            {"op": "linear", "tactic": "fast", "shape": "[64]", "calls": 2, "max_tokens": 8,
             "reason": "timed", "microseconds": {"slow": 9.25, "fast": 3.5}, "rejected": {
                 "wrong": "departs from the reference"}}
        ],
        passes=[{"name": "fuse_qkv", "matched": 0, "changed": 0, "choice": "off", "note": "switched off"}],
    )  # fmt: skip
    out = pelton("inspect", engine).out
    assert re.search(r"linear +\[64\] +fast +<= 8 +3\.5 +taken", out)
    assert re.search(r"linear +\[64\] +slow +<= 8 +9\.2", out)
    assert "off by the user; switched off" in out
    words = " ".join(page(pelton, engine, tmp_path)[1].words)
    assert "departs from the reference" in words and "3.5 µs" in words and "off by the user" in words
    figures = {"kl_mean": 0.5, "evaluation": {"text": "prose.txt", "kl_mean": 0.0123456789, "gate": ""}}
    edit_report(engine, quality=figures)
    out = pelton("inspect", engine).out
    assert re.search(r"on text: text +prose\.txt\n +on text: kl_mean +0\.0123457\n", out)
    assert "on text: gate" not in out
    assert "on text: kl_mean 0.0123457" in " ".join(page(pelton, engine, tmp_path)[1].words)
    assert re.search(r"on text: kl_mean +- +0\.0123457", pelton("diff", text_engine, engine).out)
    edit_report(engine, tactics=None, passes=None, quality=None)
    assert pelton("inspect", engine).code == 0
    assert "kept no report of its passes" in " ".join(page(pelton, engine, tmp_path)[1].words)


def test_live_bytes_are_what_is_between_making_and_last_use(text_engine: Path) -> None:
    engine = open_engine(text_engine)
    plan = engine.plan
    live = live_bytes(plan)
    made = producers(plan)
    for index in range(len(plan.instructions)):
        used_now_or_later = {
            plan.operands[o].buffer
            for i in plan.instructions[index:]
            for o in (*i.inputs, *i.outputs)
            if o >= 0
        } | {plan.operands[plan.logits].buffer}
        alive = [b for b, begin in made.items() if begin <= index and b in used_now_or_later]
        assert live[index] == sum(plan.buffers[b].nbytes for b in alive)
    assert max(live) <= plan.arena_bytes
    weights = summarise(engine).weights
    assert sum(w.nbytes for w in weights) == engine.config.memory.weights


def test_equal_engines_do_not_differ(pelton: Run, text_engine: Path, tmp_path: Path) -> None:
    again = build_text_engine(tmp_path / "again.engine")
    result = pelton("diff", text_engine, again, "--exit-code")
    assert (result.code, result.out) == (0, "text.engine and again.engine are the same.\n")
    assert json.loads(pelton("diff", text_engine, again, "--json").out)["equal"] is True


def test_a_difference_is_told_by_section(pelton: Run, text_engine: Path, tmp_path: Path) -> None:
    other = build_text_engine(
        tmp_path / "other.engine", passes={"fuse_qkv": "off"}, max_batch_size=2, dtype="bfloat16"
    )
    result = pelton("diff", text_engine, other, "--json", "--exit-code")
    assert result.code == 1
    found = json.loads(result.out)
    assert {"what": "max_batch_size", "before": "4", "after": "2", "count": 1} in found["settings"]
    q = next(c for c in found["plan"] if c["what"] == "model.layers.N.self_attn.q_proj.linear")
    assert (q["before"], q["count"]) == ("", 4)
    assert q["after"].startswith("linear(float32[T, 64], bfloat16 ")
    qkv = next(c for c in found["plan"] if "qkv_proj.linear" in c["what"])
    assert (qkv["after"], qkv["count"]) == ("", 4)
    down = next(c for c in found["tactics"] if "down_proj" in c["what"])
    assert "float32" in down["before"] and "bfloat16" in down["after"] and down["count"] == 4
    assert any(c["what"].startswith("bfloat16") and not c["before"] for c in found["weights"])
    assert {c["what"] for c in found["memory"]} >= {"weights"}
    assert next(c for c in found["passes"] if c["what"] == "fuse_qkv")["after"].endswith("switched off")
    assert "kl_mean" in {c["what"] for c in found["quality"]}
    text = pelton("diff", text_engine, other).out
    assert re.search(r"model\.layers\.N\.self_attn\.q_proj\.linear x4 +- +linear\(", text)
    assert pelton("diff", text_engine, other).code == 0, "without --exit-code a difference is no failure"


def test_weights_of_other_values_differ_by_their_file(pelton: Run, text_engine: Path, tmp_path: Path) -> None:
    spoilt = tmp_path / "s.engine"
    shutil.copytree(text_engine, spoilt)
    spoil_weight(spoilt, "model.norm.weight")
    found = json.loads(pelton("diff", text_engine, spoilt, "--json").out)
    assert [c["what"].split("/")[0] for c in found["files"]] == ["weights"]
    assert not any(found[name] for name in ("settings", "plan", "tactics", "weights", "memory"))


def test_different_models_are_one_sentence(pelton: Run, text_engine: Path, tmp_path: Path) -> None:
    other = build_text_engine(tmp_path / "other.engine", text_checkpoint(num_hidden_layers=1))
    result = pelton("diff", text_engine, other)
    assert result.code == 2
    assert result.err.startswith("pelton: text.engine and other.engine are of different models (tiny and")
    assert result.err.endswith(": num_layers is 4 and 1\n")


def test_the_json_can_be_read_back(pelton: Run, text_engine: Path) -> None:
    record = json.loads(pelton("inspect", text_engine, "--json", "--plan").out)
    summary = summarise(open_engine(text_engine))
    assert record["blocks"] == json.loads(msgspec.json.encode(summary.blocks))
    assert (
        sum(len(b["instructions"]) * max(1, b["layers"]) for b in record["blocks"]) == record["instructions"]
    )
    assert record["tactics"][0].keys() >= {"op", "tactic", "max_tokens", "instructions"}


def test_the_declared_memory_is_that_of_a_session_at_the_limits(pelton: Run, text_engine: Path) -> None:
    with Session(text_engine) as session:
        assert session.memory is not None
        want = session.memory
    record = json.loads(pelton("inspect", text_engine, "--json").out)
    declared = record["declared_memory"]
    assert declared.pop("declared") == want.declared
    assert declared == {name: getattr(want, name) for name in DeclaredMemory.__struct_fields__}
    assert "measured_memory" not in record
    text = pelton("inspect", text_engine).out
    assert re.search(rf"declared +{human_bytes(want.declared)} at the limits, besides", text)
    assert "short run" not in text


@pytest.mark.skipif(not native.available(), reason="the native library is not built")
def test_measured_memory_stands_beside_what_that_session_declared(pelton: Run, text_engine: Path) -> None:
    record = json.loads(pelton("inspect", text_engine, "--measure", "--json").out)
    declared, measured = record["declared_memory"], record["measured_memory"]
    assert 0 < measured["kv"] < declared["kv"], "a short run needs fewer blocks"
    same = declared.keys() - {"kv", "declared"}
    assert {name: measured[name] for name in same} == {name: declared[name] for name in same}
    assert declared["declared"] - measured["declared"] == declared["kv"] - measured["kv"]
    assert 0 <= measured["growth"] <= measured["declared"]
    text = pelton("inspect", text_engine, "--measure").out
    assert re.search(rf"short run +{human_bytes(measured['declared'])} declared, .* taken", text)
