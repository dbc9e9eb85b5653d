"""What the machine lets a process use."""

from __future__ import annotations

from pathlib import Path

import pytest

from pelton.engine import resources

GB = 10**9


def test_a_containers_file_cache_is_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "_CGROUP", tmp_path)
    monkeypatch.setattr(resources, "_system_available", lambda: 100 * GB)
    assert resources.available_memory() == 100 * GB
    (tmp_path / "memory.max").write_text(f"{8 * GB}\n")
    (tmp_path / "memory.current").write_text(f"{7 * GB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {2 * GB}\nfile {5 * GB}\ninactive_file {4 * GB}\n")
    assert resources.available_memory() == 5 * GB
    (tmp_path / "memory.max").write_text("max\n")
    assert resources.available_memory() == 100 * GB
