"""Servers and engines for the tests of the faces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.serving.fake_engine import SESSION, write_fake_engine
from tests.serving.running_server import RunningServer


@pytest.fixture(scope="session")
def fake_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fake engine directory; run it with ``session=SESSION``."""
    return write_fake_engine(tmp_path_factory.mktemp("fake") / "fake.engine")


@pytest.fixture(scope="module")
def server(fake_engine: Path) -> Iterator[RunningServer]:
    """A server of the fake engine, shared by a module's tests."""
    with RunningServer(fake_engine, session=SESSION) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    """The official client of ``server``; it does not retry."""
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made
