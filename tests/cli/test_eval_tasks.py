"""``pelton eval --tasks`` over a stand-in for the harness (``tests/serving`` has the harness itself)."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pelton.builder.report_file import keep_quality
from pelton.engine.artifact import open_engine
from pelton.models.checkpoint import open_checkpoint
from pelton.serving.cli.main import run_command
from tests.cli.test_quantize import folder
from tests.cli.text_engine import build_text_engine
from tests.serving.fake_engine import TEMPLATE

Capture = pytest.CaptureFixture[str]
DOCS = [("The sky is", " blue"), ("Two and two are", " four"), ("Water is", " wet")]


class Task:
    def __init__(self, name: str) -> None:
        self.task_name = name
        self.UNSAFE_CODE = name == "programs"


class Group:
    def __init__(self, *children: str) -> None:
        self.child_names = list(children)


class Manager:
    """The harness's names, and their data sets."""

    all_tasks = ("sayings", "riddles", "both", "offline", "programs", "stories", "faulty")

    def match_tasks(self, names: list[str]) -> list[str]:
        return [task for name in names for task in fnmatch.filter(self.all_tasks, name)]

    def load(self, names: list[Any]) -> dict[str, Any]:
        if len(names) > 1 and any(isinstance(n, Group) for n in names):
            raise ValueError("Duplicate task 'sayings': found in both 'both' and 'sayings'")
        if names == ["offline"]:
            raise ConnectionError("Couldn't reach 'org/offline' on the Hub (LocalEntryNotFoundError)\nmore")
        if names == ["both"]:
            group = Group("sayings", "riddles")
            return {"tasks": {n: Task(n) for n in group.child_names}, "groups": {"both": group}}
        return {"tasks": {n: Task(n) for n in names if isinstance(n, str)}}


def simple_evaluate(
    lm: Any, *, tasks: list[Any], num_fewshot: int | None, limit: int | None, **rest: Any
) -> Any:
    """Likelihoods of the answers, in the form of the harness's results."""
    print("bootstrapping for stddev")
    assert lm.tokenizer_name
    names = [n for t in tasks for n in (t.child_names if isinstance(t, Group) else [t.task_name])]
    results: dict[str, Any] = {}
    for name in names:
        if name == "faulty":
            raise ImportError("No module named 'judge'")
        if name == "stories":
            lm.generate_until([types.SimpleNamespace(args=("Once", {"max_gen_toks": 4000}))])
        asked = [
            types.SimpleNamespace(args=(_ask(lm, text, **rest), answer)) for text, answer in DOCS[:limit]
        ]
        likelihood = sum(total for total, _ in lm.loglikelihood(asked)) / len(asked)
        results[name] = {"alias": name, "sample_len": len(asked), "acc,none": 0.5, "acc_stderr,none": 0.25}
        results[name] |= {"likelihood,strict": likelihood, "likelihood_stderr,strict": "N/A", "name": name}
    if len(names) > len(tasks):
        results["both"] = {"alias": "both", "sample_len": 6, "acc,none": 0.5, "acc_stderr,none": 0.125}
    groups = {"both": ["sayings", "riddles"]} if "both" in results else {}
    return {
        "results": results,
        "group_subtasks": groups,
        "n-shot": dict.fromkeys(results, num_fewshot or 0),
    }


def _ask(lm: Any, text: str, *, apply_chat_template: bool, **_: Any) -> str:
    return str(lm.apply_chat_template([{"role": "user", "content": text}])) if apply_chat_template else text


@pytest.fixture(autouse=True)
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ours = ("pelton.serving.lm_eval", "pelton.serving.harness")
    contents: dict[str, dict[str, Any]] = {
        "lm_eval": {"simple_evaluate": simple_evaluate, "__version__": "0.4.99"},
        "lm_eval.tasks": {"TaskManager": Manager},
        "lm_eval.api": {},
        "lm_eval.api.model": {"LM": type("LM", (), {})},
    }
    for name, values in contents.items():
        module = types.ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in ours:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("tasks") / "model")


@pytest.fixture(scope="module")
def engine(source: Path) -> Path:
    return build_text_engine(source.parent / "small.engine", open_checkpoint(source), timing=False)


def test_the_table(engine: Path, capsys: Capture) -> None:
    assert run_command(["eval", str(engine), "--tasks", "both", "--num-fewshot", "2", "--limit", "2"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0] == "small.engine on tasks of lm_eval 0.4.99, the first 2 documents of each task"
    assert lines[1].split() == ["task", "metric", "value", "stderr", "shots", "documents"]
    assert lines[2].split() == ["both", "acc", "0.5000", "0.1250", "2", "6"], "a group before its tasks"
    assert lines[3].split() == ["sayings", "acc", "0.5000", "0.2500", "2", "2"]
    assert re.fullmatch(r"  sayings +likelihood \(strict\) +-\d+\.\d{4} +- +2 +2", lines[4])
    assert len(lines) == 7
    assert "bootstrapping" in captured.err, "the harness prints to standard error"


def test_quiet_is_the_result_only(engine: Path, capsys: Capture) -> None:
    assert run_command(["eval", str(engine), "--tasks", "sayings, riddles", "-q", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    found = json.loads(captured.out)
    assert (found["engine"], found["harness"]) == ("small.engine", "0.4.99")
    assert found["scores"][0] == {
        "task": "sayings", "metric": "acc", "value": 0.5, "stderr": 0.25, "shots": 0, "documents": 3
    }  # fmt: skip
    assert [s["task"] for s in found["scores"]] == ["sayings"] * 2 + ["riddles"] * 2


def test_two_engines_stand_side_by_side(source: Path, engine: Path, tmp_path: Path, capsys: Capture) -> None:
    other = build_text_engine(tmp_path / "four.engine", open_checkpoint(source), quant="int4", timing=False)
    command = ["eval", str(engine), "--tasks", "say*", "-q"]
    assert run_command([*command, "--against", str(other), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["against"] == "four.engine"
    assert run_command(["eval", str(other), "--tasks", "say*", "-q", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)["scores"]
    assert [s["against"] for s in found["scores"]] == [s["value"] for s in alone]
    assert [s.get("against_stderr") for s in found["scores"]] == [0.25, None]
    assert found["scores"][1]["value"] != found["scores"][1]["against"]
    assert run_command([*command, "--against", str(other)]) == 0
    header = capsys.readouterr().out.splitlines()[1].split()
    assert header == [
        "task",
        "metric",
        "small.engine",
        "stderr",
        "four.engine",
        "stderr",
        "shots",
        "documents",
    ]


def test_scores_are_kept_where_inspect_and_diff_show_them(
    engine: Path, tmp_path: Path, capsys: Capture
) -> None:
    before, engine = engine, shutil.copytree(engine, tmp_path / "kept.engine")
    keep_quality(engine, evaluation={"text": "prose.txt", "kl_mean": 0.5})
    command = ["eval", str(engine), "-q", "--save", "--tasks"]
    assert run_command([*command, "sayings"]) == 0
    assert run_command([*command, "both", "--limit", "1"]) == 0
    assert run_command([*command, "riddles", "--limit", "2", "--against", str(before)]) == 0
    capsys.readouterr()
    assert run_command(["inspect", str(engine)]) == 0
    out = capsys.readouterr().out
    assert "on text: kl_mean" in out, "beside what was measured on text"
    assert re.search(r"sayings: acc +0\.5000 ± 0\.2500 \(0 shots, 1 documents\)", out)
    assert re.search(r"riddles: acc +0\.5000 ± 0\.2500 \(0 shots, 2 documents\)", out)
    assert re.search(r"riddles: likelihood \(strict\) +-\d+\.\d{4} \(0 shots, 2 documents\)", out)
    assert out.count("sayings: acc") == 1, "the last result of a task is the one that is kept"
    assert run_command(["diff", str(before), str(engine)]) == 0
    assert re.search(r"both: acc +- +0\.5000 ± 0\.1250", capsys.readouterr().out)
    kept = open_engine(engine, verify=True).report()["quality"]["tasks"]
    assert not any("against" in score for score in kept)


def test_questions_go_through_the_chat_template_where_asked(
    engine: Path, tmp_path: Path, capsys: Capture
) -> None:
    command = ["--tasks", "sayings", "-q", "--save"]
    assert run_command(["eval", str(engine), *command, "--apply-chat-template"]) == 2
    assert "has no chat template" in capsys.readouterr().err
    chatting = shutil.copytree(engine, tmp_path / "chatting.engine")
    values = []
    for flags in ([], ["--apply-chat-template"]):
        # --save keeps what the manifest lists, and that is not of this.
        (chatting / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
        assert run_command(["eval", str(chatting), *command, *flags, "--json"]) == 0
        scores = json.loads(capsys.readouterr().out)["scores"]
        assert [s.get("chat", False) for s in scores] == [bool(flags)] * 2
        values.append(scores[1]["value"])
    assert values[0] != values[1]
    assert run_command(["inspect", str(chatting)]) == 0
    assert "(0 shots, 3 documents, chat template)" in capsys.readouterr().out


def test_a_score_that_is_no_number_is_shown(engine: Path, tmp_path: Path, capsys: Capture) -> None:
    engine = shutil.copytree(engine, tmp_path / "kept.engine")
    score = {"task": "sayings", "metric": "acc", "value": float("nan"), "shots": 0, "documents": 1}
    keep_quality(engine, tasks=[score])
    assert run_command(["inspect", str(engine)]) == 0
    assert re.search(r"sayings: acc +not a number \(0 shots", capsys.readouterr().out)


def test_a_checkpoint_is_built_with_the_build_flags(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("PELTON_CACHE", str(tmp_path / "cache"))
    flags = ["--quant", "int4", "--no-timing", "--max-num-tokens", "40"]
    assert run_command(["eval", str(source), "--tasks", "sayings", "--json", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    (built,) = (tmp_path / "cache" / "engines").glob("*.engine")
    assert found["engine"] == built.name and "against" not in found
    assert open_engine(built).config.build.quant is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--limit 3", "--limit is of tasks; add --tasks NAMES"),
        ("--num-fewshot 0", "--num-fewshot is of tasks"),
        ("--apply-chat-template", "--apply-chat-template is of tasks"),
        ("--tasks sayings --text prose.txt", "--text is of reading text"),
        ("--tasks sayings --tokens 80", "--tokens is of reading text"),
        ("--tasks sayings --window 8", "--window is of reading text"),
        ("--tasks ,", "--tasks has no name"),
        ("--tasks sayings --limit 0", "--limit must be at least 1, not 0"),
        ("--tasks sayings --num-fewshot -1", "--num-fewshot must be at least 0, not -1"),
        ("--tasks sayings --quant int8", "is an engine: it is measured as it was built"),
        ("--tasks saying", "no task 'saying', and no such file is there; did you mean sayings?"),
        ("--tasks sayings,qqqq", "no task 'qqqq', and no such file is there; lm_eval ls tasks lists all."),
        (
            "--tasks sayings,offline",
            "the harness cannot load task offline: ConnectionError: Couldn't reach 'org/offline' on the Hub "
            "(LocalEntryNotFoundError)\n",
        ),
        ("--tasks both,sayings", "cannot run these tasks together: ValueError: Duplicate task 'sayings'"),
        ("--tasks programs", "task programs runs code that the model writes"),
        ("--tasks stories", "answers of 4000 tokens, and the engine takes prompts of at most"),
    ],
)
def test_what_is_refused(engine: Path, arguments: str, message: str, capsys: Capture) -> None:
    assert run_command(["eval", str(engine), "-q", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_checkpoint_is_not_what_engines_are_compared_with(
    source: Path, engine: Path, capsys: Capture
) -> None:
    assert run_command(["eval", str(engine), "--tasks", "sayings", "--against", str(source)]) == 2
    assert "--tasks compares engines, and" in capsys.readouterr().err


def test_an_unknown_task_stops_before_the_build(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("PELTON_CACHE", str(tmp_path / "cache"))
    assert run_command(["eval", str(source), "--tasks", "ridles"]) == 2
    assert "did you mean riddles" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_what_fails_within_the_harness_is_a_sentence(engine: Path, capsys: Capture) -> None:
    assert run_command(["eval", str(engine), "-q", "--tasks", "faulty"]) == 1
    assert "pelton: the harness failed: ImportError: No module named 'judge'" in capsys.readouterr().err


def test_without_the_harness_it_says_what_to_install(
    engine: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for name in [name for name in sys.modules if name.startswith("lm_eval.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert run_command(["eval", str(engine), "--tasks", "sayings"]) == 2
    said = capsys.readouterr().err
    assert "needs lm_eval: pip install 'pelton[eval]'" in said and said.count("pelton:") == 1
