"""Every mistake at the command line is one sentence and an exit code; a good command works after it."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Run

Args = Callable[[Path, Path], list[object]]

#: (arguments from (engine, scratch folder), exit code, part of the message)
BAD: list[tuple[str, Args, int, str]] = [
    ("unknown command", lambda e, t: ["rum"], 2, "there is no command 'rum'; did you mean run?"),
    ("unlike command", lambda e, t: ["zzzzz"], 2, "there is no command 'zzzzz'; commands: run, chat"),
    ("unknown flag", lambda e, t: ["run", e, "x", "--temprature", 1], 2, "--temperature"),
    ("flag without value", lambda e, t: ["run", e, "x", "--seed"], 2, "requires an argument"),
    ("word for a number", lambda e, t: ["run", e, "x", "--max-tokens", "ten"], 2, "'ten' is not a valid int"),
    ("too many arguments", lambda e, t: ["run", e, "x", "y"], 2, "unexpected extra argument (y)"),
    ("no model", lambda e, t: ["run"], 2, "Missing argument 'MODEL'"),
    ("no prompt", lambda e, t: ["run", e], 2, "the prompt is empty"),
    ("empty prompt", lambda e, t: ["run", e, "", "--raw"], 2, "the prompt is empty"),
    ("no such model", lambda e, t: ["run", t / "missing.gguf", "x"], 2, "there is no"),
    ("no such user", lambda e, t: ["run", "~nobody-by-this-name/x", "x"], 2, "there is no ~nobody-by-this"),
    ("no such engine", lambda e, t: ["run", t / "missing.engine", "x"], 2, "there is no"),
    ("empty folder", lambda e, t: ["run", _folder(t), "x"], 2, "neither an engine"),
    ("text file", lambda e, t: ["run", _file(t, "a.txt", b"hello"), "x"], 2, "is not a GGUF file"),
    ("bad GGUF", lambda e, t: ["chat", _file(t, "a.gguf", b"FUGG")], 2, "is not a GGUF file"),
    ("one shard", lambda e, t: ["run", _file(t, "a.safetensors", b"xxxx"), "x"], 2, "give its folder"),
    ("config.json", lambda e, t: ["run", _file(t, "config.json", b"{}  "), "x"], 2, "give its folder"),
    ("system and raw", lambda e, t: ["run", e, "x", "--raw", "--system", "s"], 2, "--system needs"),
    ("logprobs", lambda e, t: ["run", e, "x", "--logprobs", 1], 2, "--logprobs is reported in JSON only"),
    ("stats and json", lambda e, t: ["run", e, "x", "--stats", "--json"], 2, "--stats measures the stream"),
    (
        "min-tokens",
        lambda e, t: ["run", e, "x", "--max-tokens", 2, "--min-tokens", 5],
        2,
        "0 to max_tokens, 2",
    ),
    ("temperature", lambda e, t: ["run", e, "x", "--temperature", -1], 2, "temperature is -1"),
    ("top-p", lambda e, t: ["run", e, "x", "--top-p", 7], 2, "top_p is 7.0"),
    ("not a number", lambda e, t: ["run", e, "x", "--top-p", "nan"], 2, "top_p is nan"),
    ("n", lambda e, t: ["run", e, "x", "--n", 0], 2, "n is 0"),
    ("max-tokens", lambda e, t: ["run", e, "x", "--max-tokens", 9999], 2, "max_tokens is 9999"),
    ("bias form", lambda e, t: ["run", e, "x", "--logit-bias", "7"], 2, "is not TOKEN_ID:BIAS"),
    ("pass form", lambda e, t: ["build", "x", "--pass", "fuse_qkv"], 2, "is not NAME=VALUE"),
    (
        "pass twice",
        lambda e, t: ["build", "x", "--pass", "cse=off", "--pass", "cse=force"],
        2,
        "--pass sets cse to off and to force; give it once",
    ),
    (
        "bias twice",
        lambda e, t: ["run", e, "x", "--logit-bias", "7:1", "--logit-bias", "7:2"],
        2,
        "--logit-bias sets 7 to 1.0 and to 2.0; give it once",
    ),
    ("bias id", lambda e, t: ["run", e, "x", "--logit-bias", "70000:1"], 2, "logit_bias contains 70000"),
    ("stop id", lambda e, t: ["run", e, "x", "--stop-token-ids", -1], 2, "stop_token_ids contains -1"),
    ("empty stop", lambda e, t: ["run", e, "x", "--stop", ""], 2, "stop contains"),
    ("long prompt", lambda e, t: ["run", e, "x" * 300], 2, "takes prompts of at most 255"),
    ("raised limit", lambda e, t: ["run", e, "x", "--max-seq-len", 512], 2, "it can be run with less"),
    ("zero limit", lambda e, t: ["run", e, "x", "--max-batch-size", 0], 2, "must be 1 or more"),
    ("other dtype", lambda e, t: ["run", e, "x", "--dtype", "bfloat16"], 2, "was built with dtype float32"),
    ("other block", lambda e, t: ["chat", e, "--block-size", 32], 2, "was built with block_size 16"),
    ("other kv", lambda e, t: ["serve", e, "--port", 0, "--kv-dtype", "float16"], 2, "built with kv_dtype"),
    ("no share", lambda e, t: ["run", e, "x", "--gpu-memory-fraction", 0], 2, "must be above 0 and at most"),
    (
        "more than all memory",
        lambda e, t: ["serve", e, "--port", 0, "--gpu-memory-fraction", 1.5],
        2,
        "gpu_memory_fraction must be above 0 and at most 1, not 1.5",
    ),
    (
        "share in words",
        lambda e, t: ["chat", e, "--gpu-memory-fraction", "half"],
        2,
        "'half' is not a valid float",
    ),
    ("port range", lambda e, t: ["serve", e, "--port", 70000], 2, "70000 is not in the range"),
    (
        "host",
        lambda e, t: ["serve", e, "--port", 0, "--host", "no.such.host.invalid"],
        2,
        "is not an address",
    ),
    ("foreign host", lambda e, t: ["serve", e, "--port", 0, "--host", "203.0.113.9"], 2, "is not an address"),
    ("empty key", lambda e, t: ["serve", e, "--port", 0, "--api-key", ""], 2, "--api-key is empty"),
    ("log level", lambda e, t: ["serve", e, "--log-level", "loud"], 2, "'loud' is not one of"),
    ("serve nothing", lambda e, t: ["serve", t / "x.engine", "--port", 0], 2, "there is no"),
    ("inspect nothing", lambda e, t: ["inspect", t / "x"], 2, "there is no engine at"),
    ("inspect a file", lambda e, t: ["inspect", _file(t, "b", b"x")], 2, "is a file, not an engine"),
    ("inspect a folder", lambda e, t: ["inspect", _folder(t)], 2, "it has no manifest.json"),
    ("damaged manifest", lambda e, t: ["inspect", _damaged(e, t, "manifest.json", "{")], 2, "is damaged"),
    ("damaged config", lambda e, t: ["run", _damaged(e, t, "config.json", "{}"), "x"], 2, "is damaged"),
    ("missing file", lambda e, t: ["run", _damaged(e, t, "plan.json", None), "x"], 2, "plan.json is missing"),
    ("newer format", lambda e, t: ["run", _version(e, t, 99), "x"], 2, "newer than this Pelton reads"),
    ("flipped byte", lambda e, t: ["inspect", "--verify", _flipped(e, t)], 2, "SHA-256"),
    ("build an engine", lambda e, t: ["build", e], 2, "is an engine already"),
    ("build nothing", lambda e, t: ["build", t / "x"], 2, "there is no"),
    ("build over a folder", lambda e, t: ["build", _gguf(t), "-o", t], 2, "exists already"),
    ("force over a folder", lambda e, t: ["build", _gguf(t), "-o", t, "--force"], 2, "is not an engine"),
    ("build nowhere", lambda e, t: ["build", _gguf(t), "-o", t / "a" / "b"], 2, "there is no folder"),
    ("bench rounds", lambda e, t: ["bench", e, "--rounds", 0], 2, "0 is not in the range"),
]


def _folder(scratch: Path) -> Path:
    (scratch / "empty").mkdir()
    return scratch / "empty"


def _file(scratch: Path, name: str, content: bytes) -> Path:
    (scratch / name).write_bytes(content)
    return scratch / name


def _gguf(scratch: Path) -> Path:
    return _file(scratch, "model.gguf", b"GGUF")


def _damaged(engine: Path, scratch: Path, name: str, content: str | None) -> Path:
    """A copy of ``engine`` in which one file holds ``content``, padded to its size, or is missing."""
    import shutil

    copy = scratch / "copy.engine"
    shutil.copytree(engine, copy)
    if content is None:
        (copy / name).unlink()
    else:
        size = (copy / name).stat().st_size
        (copy / name).write_text(content.ljust(size) if name != "manifest.json" else content)
    return copy


def _version(engine: Path, scratch: Path, version: int) -> Path:
    copy = _damaged(engine, scratch, "manifest.json", "{}")
    manifest = json.loads((engine / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | {"format_version": version}))
    return copy


def _flipped(engine: Path, scratch: Path) -> Path:
    content = (engine / "report.json").read_text()
    return _damaged(engine, scratch, "report.json", content.replace("fake", "fame"))


@pytest.mark.parametrize(("args", "code", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_a_mistake_is_one_sentence_and_a_good_command_works_after_it(
    run: Run, fake_engine: Path, tmp_path: Path, args: Args, code: int, message: str
) -> None:
    result = run(*args(fake_engine, tmp_path))
    assert result.code == code, result.err
    assert message in result.err
    assert result.err.startswith("pelton: ")
    assert "Traceback" not in result.err
    assert result.out == ""
    good = run("run", fake_engine, "Hello", "--max-tokens", 2)
    assert good.code == 0
    assert len(good.out) == 3


def test_a_port_in_use_is_said_before_the_model_loads(run: Run, fake_engine: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", fake_engine, "--port", port)
    assert result.code == 2
    assert result.err == (
        f"pelton: port {port} on 127.0.0.1 is in use; choose another with --port, or 0 for any free one.\n"
    )


def test_a_model_without_template_cannot_chat(run: Run, plain_engine: Path) -> None:
    assert "has no chat template" in run("chat", plain_engine).err
    assert run("run", plain_engine, "x", "--system", "s").code == 2


def test_a_bug_is_called_one(run: Run, fake_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("one over nothing")

    monkeypatch.setattr("pelton.serving.llm.LLM.stream_chat", broken)
    result = run("run", fake_engine, "x")
    assert result.code == 1
    assert "this is a bug in Pelton: ZeroDivisionError: one over nothing" in result.err


def test_a_full_disk_or_a_forbidden_folder_is_a_sentence(
    run: Run, fake_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device", "/data/x.engine")

    monkeypatch.setattr("pelton.serving.llm.LLM.stream_chat", full)
    result = run("run", fake_engine, "x")
    assert (result.code, result.err) == (1, "pelton: /data/x.engine: No space left on device\n")
