"""``pelton serve`` as a process: it says where it is, drains on SIGTERM, leaves nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.cli.conftest import fake_pelton

#: ``pelton serve`` with the fake session in its executor process.
FAKE_SERVE = """
import pelton.serving.loading as loading
original = loading.executor_spec
def fake(engine, config, threads, max_waiting, session=None, trust=False):
    return original(engine, config, threads, max_waiting, "tests.serving.fake_engine:open_fake")
loading.executor_spec = fake
import pelton.serving.async_llm
pelton.serving.async_llm.executor_spec = fake
from pelton.serving.cli.main import main
main()
"""


@contextmanager
def serving(*args: object, delay: float = 0.0) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """The process, its base URL and what it wrote to standard error before it was up."""
    env = dict(os.environ) | {"FAKE_STEP_SECONDS": str(delay)}
    with fake_pelton("serve", *args, program=FAKE_SERVE, env=env) as process:
        assert process.stderr is not None
        lines = []
        url = ""
        for line in process.stderr:
            lines.append(line.rstrip())
            if match := re.search(r"at (http://\S+)/v1", line):
                url = match[1]
            if "access" in line:
                break
        try:
            assert url, lines
            yield process, url, lines
        finally:
            if process.poll() is None:
                process.kill()


def wait_ready(url: str) -> None:
    for _ in range(200):
        try:
            if httpx.get(url + "/ready").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError("the server is not ready")


def executors(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def test_it_tells_its_address_and_budget(fake_engine: Path) -> None:
    with serving(fake_engine, "--port", 0, "--served-model-name", "tiny") as (_, url, lines):
        wait_ready(url)
        assert re.match(r"pelton: serving tiny at http://localhost:\d+/v1", lines[0])
        assert "KV up to" in lines[1]
        assert "8 sequences a step, 256 tokens a request" in lines[2]
        assert "no API key, this machine only" in lines[3]
        assert httpx.get(url + "/v1/models").json()["data"][0]["id"] == "tiny"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_drains_what_runs_and_leaves_nothing(fake_engine: Path, number: int, code: int) -> None:
    with serving(fake_engine, "--port", 0, delay=0.02) as (process, url, _):
        wait_ready(url)
        children = executors(process)
        assert len(children) == 1
        answers: list[httpx.Response] = []
        body = {"prompt": "Hello", "max_tokens": 60}

        def ask() -> None:
            answers.append(httpx.post(url + "/v1/completions", json=body, timeout=60))

        asking = threading.Thread(target=ask)
        asking.start()
        time.sleep(0.5)
        process.send_signal(number)
        asking.join(60)
        assert answers[0].status_code == 200
        assert answers[0].json()["usage"]["completion_tokens"] == 60
        assert process.wait(20) == code
        gone, alive = psutil.wait_procs(children, timeout=5)
        assert gone
        assert not alive
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_the_drain_has_a_deadline(fake_engine: Path) -> None:
    with serving(fake_engine, "--port", 0, "--drain-seconds", 1, delay=0.2) as (process, url, _):
        wait_ready(url)
        with httpx.stream(
            "POST",
            url + "/v1/completions",
            json={"prompt": "x", "max_tokens": 200, "stream": True},
            timeout=60,
        ) as response:
            lines = response.iter_lines()
            next(lines)
            start = time.monotonic()
            process.send_signal(signal.SIGTERM)
            events = [line.removeprefix("data: ") for line in lines if line]
        assert len(events) < 20, "200 tokens would take 40 s"
        assert json.loads(events[-2])["error"]["type"] == "service_unavailable_error"
        assert process.wait(20) == 0
        assert time.monotonic() - start < 10
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_a_signal_while_the_model_loads_leaves_nothing(fake_engine: Path, tmp_path: Path) -> None:
    env = dict(os.environ) | {"TMPDIR": str(tmp_path)}
    with fake_pelton("serve", fake_engine, "--port", 0, program=FAKE_SERVE, env=env) as process:
        while not (children := executors(process)):
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    assert list(tmp_path.iterdir()) == []


def test_killing_the_server_takes_its_executor_along(fake_engine: Path) -> None:
    with serving(fake_engine, "--port", 0) as (process, url, _):
        wait_ready(url)
        children = executors(process)
        process.kill()
        _, alive = psutil.wait_procs(children, timeout=5)
        assert not alive


def test_a_key_from_the_environment_is_required(fake_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PELTON_API_KEY", "sesame")
    with serving(fake_engine, "--port", 0) as (_, url, lines):
        wait_ready(url)
        assert "API key, this machine only" in lines[3]
        assert httpx.get(url + "/v1/models").status_code == 401
        headers = {"Authorization": "Bearer sesame"}
        assert httpx.get(url + "/v1/models", headers=headers).status_code == 200


def test_an_engine_that_does_not_load_is_one_sentence(tmp_path: Path, fake_engine: Path) -> None:
    import shutil

    copy = tmp_path / "x.engine"
    shutil.copytree(fake_engine, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | {"target": "cuda sm_90"}))
    with fake_pelton("serve", copy, "--port", 0, program=FAKE_SERVE) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.startswith("pelton: ")
    assert "was built for cuda sm_90" in err
    assert err.count("\n") == 1
