"""Starting and stopping the server: bind first, load, say where it is, drain, leave."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import uvicorn

from pelton.engine.config import BuildConfig
from pelton.errors import ConfigError
from pelton.serving.async_llm import AsyncLLM
from pelton.serving.server.app import create_app
from pelton.serving.server.settings import ServerSettings


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Everything ``pelton serve`` was told, with the model resolved to an engine."""

    engine: Path
    overrides: BuildConfig = field(default_factory=BuildConfig)
    host: str = "127.0.0.1"
    api_keys: tuple[str, ...] = ()
    model_ids: tuple[str, ...] = ()
    max_waiting: int = 256
    max_n: int = 16
    max_body_bytes: int = 16 << 20
    allow_origins: tuple[str, ...] = ()
    enable_refit: bool = False
    trust: bool = False
    drain_seconds: int = 20
    log_level: str = "info"
    session: str = "pelton.engine.session:Session"
    """``module:callable`` that makes the session (``ExecutorSpec.session``)."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises ``ConfigError`` with the way out."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"--host {host} is not an address of this machine ({error.strerror}).") from error
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        # Listening now would take connections that nobody answers while the model loads, and not
        # listening would let another process take the port: bound and not listening refuses both.
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use; choose another with --port, or 0 for any free one."
            ) from error
        if error.errno == errno.EACCES:
            raise ConfigError(f"port {port} needs privileges; choose one above 1023 with --port.") from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"--host {host} is not an address of this machine.") from error
        raise
    return bound


#: Seconds an idle connection is kept. Longer than clients and proxies keep theirs (httpx: 5, most
#: proxies: 60), so that it is they who close: a server that closes first loses the request under way.
KEEP_ALIVE = 75

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


#: Seconds after the drain in which requests that have not ended are told so.
FAREWELL = 5


class _Server(uvicorn.Server):
    """uvicorn that leaves with a code instead of re-raising the signal that stopped it, and that ends
    what still runs after ``drain_seconds`` with an error instead of cutting the connection."""

    signal_received = 0

    def __init__(self, config: uvicorn.Config, llm: AsyncLLM, drain_seconds: int) -> None:
        super().__init__(config)
        self._llm = llm
        self._drain_seconds = drain_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests end; after ``drain_seconds`` the model goes, which ends the others."""

        async def end() -> None:
            await asyncio.sleep(self._drain_seconds)
            await self._llm.close()

        ending = asyncio.create_task(end())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        def stop(number: int, frame: FrameType | None) -> None:
            if self.should_exit:
                self.force_exit = True  # the second one does not wait
            self.should_exit = True
            self.signal_received = self.signal_received or number

        previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def run_server(launch: Launch, bound: socket.socket) -> int:
    """Serve until a signal; the exit code is 0 after SIGTERM, 130 after Ctrl-C."""
    logging.basicConfig(
        level=launch.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    with contextlib.closing(bound):
        try:
            return asyncio.run(_serve(launch, bound))
        except asyncio.CancelledError:
            return 0  # SIGTERM while the model loaded


async def _serve(launch: Launch, bound: socket.socket) -> int:
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None
    # Until the server takes signals itself: what is loaded so far, the executor's process, goes too.
    loop.add_signal_handler(signal.SIGTERM, this.cancel)
    llm = await AsyncLLM.start(
        launch.engine,
        overrides=launch.overrides,
        max_waiting=launch.max_waiting,
        session=launch.session,
        trust=launch.trust,
    )
    try:
        settings = ServerSettings(
            model_ids=launch.model_ids or (llm.model_id,),
            api_keys=launch.api_keys,
            max_body_bytes=launch.max_body_bytes,
            max_n=launch.max_n,
            allow_origins=launch.allow_origins,
            enable_refit=launch.enable_refit,
        )
        server = _Server(
            uvicorn.Config(
                create_app(llm, settings),
                log_config=None,
                access_log=launch.log_level == "debug",
                timeout_graceful_shutdown=launch.drain_seconds + FAREWELL,
                timeout_keep_alive=KEEP_ALIVE,
                lifespan="off",
                ws="none",
            ),
            llm,
            launch.drain_seconds,
        )
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        # Port 0 has become a real one.
        port = bound.getsockname()[1]
        print(_greeting(llm, settings, launch.host, port), file=sys.stderr, flush=True)
        loop.remove_signal_handler(signal.SIGTERM)
        await server.serve(sockets=[bound])
        return 130 if server.signal_received == signal.SIGINT else 0
    finally:
        await llm.close()


def _greeting(llm: AsyncLLM, settings: ServerSettings, host: str, port: int) -> str:
    """Where the server is and what it may use."""
    from pelton.engine.resources import human_bytes

    build, memory = llm.config.build, llm.config.memory
    stats = llm.stats()
    assert build.block_size is not None
    kv_tokens = min(group.total_blocks for group in stats.kv_groups) * build.block_size
    shown = "localhost" if host in (*_LOOPBACK, "0.0.0.0", "::") else host
    lines = [
        f"pelton: serving {', '.join(settings.model_ids)} at http://{shown}:{port}/v1",
        f"  memory   weights {human_bytes(memory.weights)}, "
        f"work {human_bytes(memory.work)}, "
        f"KV up to {human_bytes(kv_tokens * memory.kv_bytes_per_token)} ({kv_tokens} tokens)",
        f"  limits   {build.max_batch_size} sequences a step, {llm.max_request_tokens} tokens a request, "
        f"{llm.max_waiting} waiting",
        f"  access   {'API key' if settings.api_keys else 'no API key'}, "
        f"{'this machine only' if host in _LOOPBACK else 'whoever reaches ' + host}",
    ]
    if host not in _LOOPBACK and not settings.api_keys:
        lines.append("  warning  anybody who reaches this machine may use the server; set --api-key")
    return "\n".join(lines)
