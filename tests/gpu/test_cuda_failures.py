"""Memory that is not there, and a GPU that fails: clear words, nothing kept, a server that is not ready."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from pelton.engine import session as session_module
from pelton.engine.artifact import open_engine
from pelton.engine.cuda.placement import gpu_free
from pelton.engine.session import Session
from pelton.errors import ConfigError
from pelton.kernels.gpu.driver import Device, Memory
from tests.gpu.breaking import BREAK, SESSION

pytestmark = pytest.mark.gpu


def test_a_fraction_that_does_not_hold_the_weights_is_refused(engine: tuple[Path, str]) -> None:
    with pytest.raises(ConfigError, match=r"needs .* for weights and work; .* free on .*, of which 0% may"):
        Session(engine[0], gpu_memory_fraction=1e-4)


def test_memory_that_others_took_is_said(engine: tuple[Path, str]) -> None:
    device = Device()
    opened = open_engine(engine[0])
    free = device.memory()[0]
    least = free * 0.9 - gpu_free(opened, device, 0.9)
    fraction = 1.2 * least / free
    assert gpu_free(opened, device, fraction) > 0
    others = Memory(free // 2)
    try:
        with pytest.raises(ConfigError, match="for weights and work"):
            Session(opened, gpu_memory_fraction=fraction)
    finally:
        others.close()


def test_a_cache_that_does_not_fit_is_one_sentence_and_leaves_nothing(
    engine: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    live: set[int] = set()
    make, close = Memory.__init__, Memory.close

    def counted(self: Memory, nbytes: int) -> None:
        make(self, nbytes)
        live.add(self.address)

    def closed(self: Memory) -> None:
        live.discard(self.address)
        close(self)

    monkeypatch.setattr(Memory, "__init__", counted)
    monkeypatch.setattr(Memory, "close", closed)
    # As if the rest of the memory had been taken after it was looked at.
    monkeypatch.setattr(session_module, "gpu_free", lambda *_: 1 << 60)
    with pytest.raises(ConfigError, match=r"the GPU has no .*B left: .* are free; use a smaller gpu_memory"):
        Session(engine[0], kv_blocks=1 << 30)
    assert not live
    monkeypatch.undo()
    with Session(engine[0], kv_blocks=16):
        pass


def ask(url: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """(status, what was answered)."""
    request = urllib.request.Request(
        url,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_gpu_that_fails_ends_what_runs_and_makes_the_server_not_ready(engine: tuple[Path, str]) -> None:
    if engine[1] != "bfloat16":
        pytest.skip("once is enough")
    for module in ("uvicorn", "fastapi", "zmq", "prometheus_client", "tokenizers"):
        pytest.importorskip(module, reason=f"servers need {module}")
    from tests.serving.running_server import RunningServer

    with RunningServer(engine[0], session=SESSION) as server:
        completions = server.url + "/v1/completions"
        assert ask(completions, {"prompt": [5, 6, 7], "max_tokens": 4})[0] == 200
        assert ask(server.url + "/ready")[0] == 200
        streamed: list[tuple[int, str]] = []
        body = {"prompt": [5, 6, 7], "max_tokens": 480, "stream": True, "ignore_eos": True}
        reader = threading.Thread(target=lambda: streamed.append(ask(completions, body)))
        reader.start()
        time.sleep(0.05)
        status, said = ask(completions, {"prompt": list(BREAK), "max_tokens": 4})
        assert status == 503, said
        assert "The executor failed: the GPU failed" in said
        assert "illegal memory access" in said or "address" in said
        reader.join(30)
        for path_of in ("/health", "/ready"):
            status, told = ask(server.url + path_of)
            assert status == 503
            assert "the GPU failed" in told
        assert ask(completions, {"prompt": [5], "max_tokens": 1})[0] == 503
        (stream,) = streamed
        assert "[DONE]" in stream[1]


IN_A_THREAD = """
import asyncio, sys
from pelton.errors import NotReadyError
from pelton.runtime.client_thread import ThreadClient
from pelton.runtime.executor import Executor
from pelton.runtime.request import SamplingParams
from pelton.runtime.validation import resolve_requests
from tests.gpu.breaking import BREAK, open_breaking

async def main():
    session = open_breaking(sys.argv[1], kv_blocks=200)
    client = ThreadClient(Executor(session))
    def submit(name, ids, n):
        params = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
        return client.submit(resolve_requests(ids, params, session.config, None, name, 0))
    async def read(updates):
        return [update async for update in updates]
    assert (await read(submit("well", [5, 6], 3)))[-1].finish_reason == "length"
    assert client.health().ok
    running = asyncio.create_task(read(submit("running", [5, 6, 7], 480)))
    await asyncio.sleep(0.02)
    breaking = asyncio.create_task(read(submit("breaking", list(BREAK), 4)))
    for task in (running, breaking):
        try:
            await asyncio.wait_for(task, 30)
            raise AssertionError("a request outlived its GPU")
        except NotReadyError as error:
            print("SAID", error)
    assert not client.health().ok
    print("HEALTH", client.health().detail)
    try:
        submit("late", [5], 1)
        raise AssertionError("a request was taken")
    except NotReadyError:
        pass
    await client.close()
    print("CLOSED")

asyncio.run(main())
"""


def test_requests_in_flight_are_told_what_the_gpu_said(engine: tuple[Path, str]) -> None:
    """In a process of its own: the context does not survive."""
    done = subprocess.run(
        [sys.executable, "-c", IN_A_THREAD, str(engine[0])],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["SAID", "SAID", "HEALTH", "CLOSED"]
    for line in lines[:3]:
        assert "The executor failed: DeviceError: the GPU failed (" in line
        assert "restart to use it again" in line
