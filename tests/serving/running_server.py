"""A real server on a free port, in a thread of the test process; its executor is a process of its own."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

import uvicorn

from pelton.serving.async_llm import AsyncLLM
from pelton.serving.server.app import create_app
from pelton.serving.server.launch import KEEP_ALIVE, bind
from pelton.serving.server.settings import ServerSettings
from tests.serving.held import held_by


class RunningServer:
    """Use as a context manager. ``settings`` are fields of ``ServerSettings``."""

    def __init__(
        self, engine: Path, *, session: str | None = None, max_waiting: int = 256, **settings: Any
    ) -> None:
        self._engine = engine
        self._session = session
        self._max_waiting = max_waiting
        self._settings = {"model_ids": ("test-model",), **settings}
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.llm: AsyncLLM
        self.url = ""

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error)
            raise

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.llm = await AsyncLLM.start(self._engine, session=self._session, max_waiting=self._max_waiting)
        bound = bind("127.0.0.1", 0)
        app = create_app(self.llm, ServerSettings(**self._settings))
        self._server = uvicorn.Server(
            uvicorn.Config(app, log_config=None, lifespan="off", timeout_keep_alive=KEEP_ALIVE)
        )
        serving = asyncio.create_task(self._server.serve(sockets=[bound]))
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.01)
        self.url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        self._started.set_result(None)
        await serving
        await self.llm.close()
        bound.close()

    def held(self) -> list[str]:
        """``held_by`` of this server, from any thread."""

        async def ask() -> list[str]:
            return held_by(self._server)

        return asyncio.run_coroutine_threadsafe(ask(), self._loop).result(timeout=60)

    def __enter__(self) -> RunningServer:
        self._thread.start()
        self._started.result(timeout=60)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=60)
        assert not self._thread.is_alive(), "the server did not stop"
