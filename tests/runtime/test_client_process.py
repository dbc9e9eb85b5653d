"""The executor in its own process: starting, failing to start, ending, never being left behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from pelton.errors import ConfigError, EngineError, NotReadyError
from pelton.runtime.client_process import ProcessClient
from pelton.runtime.config import ExecutorConfig
from pelton.runtime.executor_spec import ExecutorSpec
from pelton.runtime.request import Request, SamplingParams
from tests.serving.fake_engine import SESSION, write_fake_engine


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ExecutorSpec:
    engine = write_fake_engine(tmp_path_factory.mktemp("process") / "fake.engine")
    return ExecutorSpec(engine=str(engine), session=SESSION)


def request(name: str, tokens: int = 5) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(b"Hello"),
        sampling=SamplingParams(temperature=0.0, max_tokens=tokens),
        arrival_time=time.monotonic(),
    )


def test_requests_run_and_closing_leaves_nothing(spec: ExecutorSpec) -> None:
    async def main() -> None:
        client = await ProcessClient.start(spec)
        folder = Path(client._folder)
        assert folder.stat().st_mode & 0o777 == 0o700
        updates = [u async for u in client.submit([request("a"), request("b", 9)])]
        for name, count in (("a", 5), ("b", 9)):
            mine = [u for u in updates if u.request_id == name]
            assert sum(len(u.new_token_ids) for u in mine) == count
            assert mine[-1].finish_reason == "length"
        pid = client.pid
        await client.close()
        await client.close()
        assert not psutil.pid_exists(pid)
        assert not folder.exists()
        assert client._process.returncode == 0
        with pytest.raises(NotReadyError, match="closed"):
            client.submit([request("c")])

    asyncio.run(main())


def test_an_abort_ends_the_iterator(spec: ExecutorSpec) -> None:
    async def main() -> None:
        client = await ProcessClient.start(spec)
        seen = []
        async for update in client.submit([request("a", 200)]):
            seen.append(update)
            client.abort("a")
        assert seen[-1].finish_reason == "abort"
        client.abort("a")
        client.abort("never")
        assert [u.finish_reason async for u in client.submit([request("b", 1)])] == ["length"]
        await client.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (
            {"session": "pelton.engine.session:Session", "engine": "/nowhere"},
            EngineError,
            "there is no engine",
        ),
        ({"executor": ExecutorConfig(max_num_seqs=99)}, ConfigError, "max_num_seqs is 99"),
        ({"session": "tests.serving.fake_engine:missing"}, NotReadyError, "has no attribute 'missing'"),
        ({"session": "os:abort"}, NotReadyError, "TypeError"),
    ],
)
def test_what_loading_raises_is_raised_here(
    spec: ExecutorSpec, change: dict[str, object], error: type[Exception], sentence: str
) -> None:
    import msgspec

    async def main() -> None:
        with pytest.raises(error, match=sentence):
            await ProcessClient.start(msgspec.structs.replace(spec, **change))

    asyncio.run(main())


def test_a_killed_parent_leaves_no_orphan(spec: ExecutorSpec) -> None:
    program = textwrap.dedent(
        f"""
        import asyncio, os
        from pelton.runtime.client_process import ProcessClient
        from pelton.runtime.executor_spec import ExecutorSpec
        async def main():
            client = await ProcessClient.start(ExecutorSpec(engine={spec.engine!r}, session={SESSION!r}))
            print(client.pid, flush=True)
            await asyncio.sleep(60)
        asyncio.run(main())
        """
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=env) as parent:
        assert parent.stdout is not None
        executor = psutil.Process(int(parent.stdout.readline()))
        assert executor.is_running()
        parent.kill()
    gone, alive = psutil.wait_procs([executor], timeout=5)
    assert not alive
    assert gone


def test_a_reader_that_does_not_read_bounds_what_is_buffered(spec: ExecutorSpec) -> None:
    """The socket holds a bounded number of steps; beyond, the executor waits for the front end."""
    import zmq

    from pelton.runtime.executor_process import Failed, _Channel

    context = zmq.Context()
    receiver = context.socket(zmq.PAIR)
    receiver.setsockopt(zmq.RCVHWM, 10)
    port = receiver.bind_to_random_port("tcp://127.0.0.1")
    channel = _Channel(f"tcp://127.0.0.1:{port}")
    assert channel._socket.getsockopt(zmq.SNDHWM) > 0
    channel._socket.setsockopt(zmq.SNDTIMEO, 200)
    channel._socket.setsockopt(zmq.LINGER, 0)

    def flood() -> None:
        for _ in range(100_000):
            channel.send(Failed("x" * 1000))

    with pytest.raises(zmq.Again):
        flood()
    channel.close()
    receiver.close(0)
    context.term()
