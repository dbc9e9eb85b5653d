"""Weights are mapped ahead of the first step, where memory allows, and only until the session closes."""

from __future__ import annotations

import mmap
import re
import sys
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pelton.engine import prefault
from pelton.engine.prefault import Prefault

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")

SIZE = 20 << 20


def mapped(path: Path) -> npt.NDArray[np.uint8]:
    path.write_bytes(b"\1" * SIZE)
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def resident(path: Path) -> int:
    """Bytes of the mapping of ``path`` that are in this process's page table."""
    lines = Path("/proc/self/smaps").read_text().split("\n")
    start = next(i for i, line in enumerate(lines) if line.endswith(str(path)))
    rss = next(line for line in lines[start:] if line.startswith("Rss:"))
    return int(re.findall(r"\d+", rss)[0]) * 1024


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "pelton-prefault"]


def test_every_page_is_mapped_when_it_is_done(tmp_path: Path) -> None:
    file = mapped(tmp_path / "weights")
    assert resident(tmp_path / "weights") < SIZE
    ahead = Prefault([file])
    ahead.wait()
    assert resident(tmp_path / "weights") == SIZE
    ahead.close()
    ahead.close()
    assert not threads()


def test_weights_beyond_half_of_the_memory_are_left_to_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = mapped(tmp_path / "weights")
    monkeypatch.setattr(prefault, "available_memory", lambda: 2 * SIZE - 1)
    ahead = Prefault([file])
    assert not threads()
    ahead.close()
    assert resident(tmp_path / "weights") < SIZE


def test_closing_stops_it_between_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = mapped(tmp_path / "weights")
    monkeypatch.setattr(prefault, "_PIECE", 1 << 12)
    ahead = Prefault([file] * 1000)
    ahead.close()
    assert not threads()
