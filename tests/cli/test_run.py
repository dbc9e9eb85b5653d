"""``pelton run`` and ``pelton chat``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pelton.serving.cli.options import sampling_params
from tests.cli.conftest import FAKE_MAIN, Run, fake_pelton


def test_the_answer_alone_is_on_stdout(run: Run, fake_engine: Path) -> None:
    result = run("run", fake_engine, "Hello", "--max-tokens", 12)
    assert (result.code, result.err) == (0, "")
    assert len(result.out) == 13
    assert result.out.endswith("\n")


def test_the_prompt_comes_from_stdin_too(run: Run, fake_engine: Path) -> None:
    argument = run("run", fake_engine, "Hello", "--max-tokens", 8)
    assert run("run", fake_engine, "-", "--max-tokens", 8, stdin="Hello\n").out == argument.out
    assert run("run", fake_engine, "--max-tokens", 8, stdin="Hello").out == argument.out


def test_a_chat_template_is_used_unless_raw(run: Run, fake_engine: Path, plain_engine: Path) -> None:
    def prompt(*args: object) -> str:
        return str(json.loads(run("run", *args, "--max-tokens", 2, "--json").out)["prompt"])

    assert prompt(fake_engine, "Hi") == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert "system\nBe brief" in prompt(fake_engine, "Hi", "--system", "Be brief")
    assert prompt(fake_engine, "Hi", "--raw") == "Hi"
    assert prompt(plain_engine, "Hi") == "Hi"


def test_json_is_one_object_with_every_answer(run: Run, fake_engine: Path) -> None:
    result = run(
        *("run", fake_engine, "Hello", "--json", "--n", 2, "--temperature", 1, "--seed", 1),
        *("--max-tokens", 4, "--logprobs", 2, "--prompt-logprobs", 0),
    )
    record = json.loads(result.out)
    assert record["model"] == "fake-model"
    assert [len(o["token_ids"]) for o in record["outputs"]] == [4, 4]
    assert len(record["outputs"][0]["logprobs"]) == 4
    assert len(record["prompt_logprobs"]) == len(record["prompt_token_ids"])


def test_several_answers_are_set_apart(run: Run, fake_engine: Path) -> None:
    out = run("run", fake_engine, "Hello", "--n", 3, "--temperature", 1, "--seed", 1, "--max-tokens", 5).out
    lines = out.splitlines()
    assert [line for line in lines if line.startswith("---")] == ["--- answer 2", "--- answer 3"]


def test_every_sampling_flag_takes_effect(run: Run, fake_engine: Path) -> None:
    def text(*flags: object) -> str:
        result = run("run", fake_engine, "Hello", "--raw", "--max-tokens", 10, *flags)
        assert result.code == 0, result.err
        return result.out[:-1]

    plain = text()
    assert text("--temperature", 2, "--seed", 1) == text("--temperature", 2, "--seed", 1) != plain
    assert text("--temperature", 1, "--top-k", 1) == plain
    assert text("--temperature", 1, "--top-p", 0.001) == plain
    assert text("--temperature", 1, "--min-p", 1) == plain
    assert text("--repetition-penalty", 5) != plain
    biased = ("--logit-bias", "97:4")
    assert text(*biased, "--presence-penalty", 2).count("a") < text(*biased).count("a")
    assert text(*biased, "--frequency-penalty", 2).count("a") < text(*biased).count("a")
    assert text("--stop", plain[3:5]) == plain[: plain.index(plain[3:5])]
    assert text("--stop", plain[3:5], "--include-stop-str-in-output").endswith(plain[3:5])
    assert text("--stop-token-ids", ord(plain[4])) == plain[: plain.index(plain[4])]
    assert text("--logit-bias", "33:100") == "!" * 10
    assert text("--logit-bias", "257:100", "--min-tokens", 3) and len(text("--logit-bias", "257:100")) == 0
    assert text("--logit-bias", "257:100", "--ignore-eos", "--no-skip-special-tokens") == "</s>" * 10
    assert plain[0] not in text("--bad-words", plain[0])
    assert set(text("--allowed-token-ids", 97, "--allowed-token-ids", 98)) <= {"a", "b"}


@pytest.mark.parametrize(
    ("recommended", "flags", "wanted"),
    [
        ({}, {}, {"temperature": 0.7, "top_p": 0.9}),
        ({}, {"seed": 1}, {"temperature": 0.7, "top_p": 0.9, "seed": 1}),
        ({}, {"temperature": 1.0}, {"temperature": 1.0}),
        ({}, {"top_k": 5}, {"top_k": 5}),
        ({"temperature": 0.6}, {"seed": 1}, {"seed": 1}),
    ],
)
def test_sampling_is_careful_where_nobody_says_how(
    recommended: dict[str, Any], flags: dict[str, Any], wanted: dict[str, Any]
) -> None:
    model = SimpleNamespace(generation=recommended)
    llm: Any = SimpleNamespace(config=SimpleNamespace(model=model), sampling_params=lambda **given: given)
    assert sampling_params(llm, flags) == wanted


def test_stats_are_on_stderr(run: Run, fake_engine: Path) -> None:
    result = run("run", fake_engine, "Hello", "--max-tokens", 5, "--stats")
    assert "5 generated; first token after" in result.err
    assert len(result.out) == 6


def test_lowered_limits_hold(run: Run, fake_engine: Path) -> None:
    result = run("run", fake_engine, "Hello", "--raw", "--max-seq-len", 20, "--json")
    assert len(json.loads(result.out)["outputs"][0]["token_ids"]) == 15


def test_a_closed_pipe_is_silent(fake_engine: Path) -> None:
    with fake_pelton("run", fake_engine, "Hello", "--max-tokens", 200) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(3)
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(20) == 141


def test_ctrl_c_ends_it_with_130_and_no_traceback(fake_engine: Path) -> None:
    env = dict(os.environ) | {"FAKE_STEP_SECONDS": "0.05"}
    with fake_pelton("run", fake_engine, "Hello", "--max-tokens", 200, env=env) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(3)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr.read() == ""


def test_a_chat_remembers_and_obeys_commands(run: Run, fake_engine: Path) -> None:
    script = "\n".join(
        ["/help", "Hi", "/system Be brief", "/system", "Hi", "/reset", "/nonsense", "/exit", "x"]
    )
    result = run("chat", fake_engine, "--max-tokens", 6, stdin=script)
    assert result.code == 0
    first, second = result.out.splitlines()
    assert len(first) == len(second) == 6
    assert first != second, "the system message is part of the second prompt"
    for part in ("/reset", "Be brief", "There is no /nonsense", "The conversation is forgotten"):
        assert part in result.err


def test_the_second_turn_sees_the_first(run: Run, fake_engine: Path) -> None:
    flags = ("--max-tokens", 6)
    two = run("chat", fake_engine, *flags, stdin="Hi\nAgain").out.splitlines()
    alone = run("chat", fake_engine, *flags, stdin="Again").out.splitlines()
    after_reset = run("chat", fake_engine, *flags, stdin="Hi\n/reset\nAgain").out.splitlines()
    assert two[1] != alone[0] == after_reset[1]


def test_a_line_can_go_on(run: Run, fake_engine: Path) -> None:
    flags = ("--max-tokens", 6)
    joined = run("chat", fake_engine, *flags, stdin="one\\\ntwo").out
    assert len(joined.splitlines()) == 1


def test_a_question_too_long_is_said_and_the_chat_goes_on(run: Run, fake_engine: Path) -> None:
    result = run("chat", fake_engine, "--max-tokens", 6, stdin="x" * 300 + "\nHi")
    assert result.code == 0
    assert "the prompt has" in result.err
    assert result.out == run("chat", fake_engine, "--max-tokens", 6, stdin="Hi").out


def test_ctrl_c_in_a_chat_stops_the_answer_only(fake_engine: Path) -> None:
    env = dict(os.environ) | {"FAKE_STEP_SECONDS": "0.05"}
    with fake_pelton("chat", fake_engine, stdin=subprocess.PIPE, env=env) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write("Hi\n")
        process.stdin.flush()
        process.stdout.read(3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate("/exit\n", timeout=20)
        assert process.returncode == 0
        assert "(stopped)" in err
        assert len(out) < 100


def test_a_terminal_that_cannot_show_a_character_gets_a_question_mark(fake_engine: Path) -> None:
    env = dict(os.environ) | {"PYTHONIOENCODING": "ascii"}
    flags = ("--raw", "--max-tokens", 2, "--allowed-token-ids", 0xC3, "--min-tokens", 2)
    with fake_pelton("run", fake_engine, "Hi", *flags, env=env) as process:
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "??\n", "")


def test_closed_standard_streams_are_no_bug(fake_engine: Path) -> None:
    script = f"import os\nfor fd in 0, 1: os.close(fd)\nos.execv({sys.executable!r}, {{}})"
    for args, code, said in (
        (["run", str(fake_engine)], 2, "pelton: the prompt is empty.\n"),
        (["run", str(fake_engine), "Hi", "--max-tokens", "2"], 0, ""),
    ):
        command = [sys.executable, "-c", FAKE_MAIN, *args]
        with fake_pelton(program=script.format(command)) as process:
            _, err = process.communicate(timeout=20)
        assert (process.returncode, err) == (code, said)


def test_bytes_that_are_not_text_stand_as_replacement_characters(run: Run, fake_engine: Path) -> None:
    result = run("run", fake_engine, "caf\udce9", "--raw", "--json", "--max-tokens", 2)
    assert result.code == 0, result.err
    assert json.loads(result.out)["prompt"] == "caf\ufffd"
