"""What a model name is, and that its engine is built once and kept."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from pelton.engine.config import BuildConfig
from pelton.errors import CheckpointError, ConfigError
from pelton.serving import engine_cache
from pelton.serving.engine_cache import cached_engine_path, classify, resolve_model
from tests.serving.fake_engine import write_fake_engine


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PELTON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    return path


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the builder; lists what was built."""
    made: list[Path] = []

    def build(checkpoint: Path, config: BuildConfig, output: Path, **_: Any) -> None:
        write_fake_engine(output)
        made.append(output)

    monkeypatch.setattr(engine_cache, "build_engine", build)
    return made


def test_an_engine_is_built_once(cache: Path, checkpoint: Path, builds: list[Path]) -> None:
    first = resolve_model(checkpoint)
    second = resolve_model(checkpoint)
    assert first == second
    assert not first.given_as_engine
    assert builds == [first.engine]
    assert first.engine.is_relative_to(cache)


def test_another_setting_or_another_checkpoint_is_another_engine(
    cache: Path, checkpoint: Path, builds: list[Path]
) -> None:
    resolve_model(checkpoint)
    resolve_model(checkpoint, BuildConfig(max_seq_len=64))
    checkpoint.write_bytes(b"GGUF" + bytes(99) + b"x")
    resolve_model(checkpoint)
    assert len(set(builds)) == 3


def test_threads_belong_to_the_session(cache: Path, checkpoint: Path) -> None:
    assert cached_engine_path(checkpoint, BuildConfig()) == cached_engine_path(
        checkpoint, BuildConfig(threads=7)
    )


def test_a_damaged_cached_engine_is_built_again(cache: Path, checkpoint: Path, builds: list[Path]) -> None:
    engine = resolve_model(checkpoint).engine
    shutil.rmtree(engine)
    engine.mkdir()
    (engine / "manifest.json").write_text("{")
    with pytest.MonkeyPatch.context() as patch:

        def rebuild(checkpoint: Path, config: BuildConfig, output: Path, **_: Any) -> None:
            shutil.rmtree(output)  # as pelton.build replaces an engine
            write_fake_engine(output)
            builds.append(output)

        patch.setattr(engine_cache, "build_engine", rebuild)
        assert resolve_model(checkpoint).engine == engine
    assert len(builds) == 2


def test_an_engine_is_used_where_it_is_and_nothing_is_written(cache: Path, tmp_path: Path) -> None:
    engine = write_fake_engine(tmp_path / "mine.engine")
    resolved = resolve_model(engine)
    assert resolved.engine == engine
    assert resolved.given_as_engine
    assert not cache.exists()


def _resolve(checkpoint: Path, counts: Any) -> None:
    def build(checkpoint: Path, config: BuildConfig, output: Path, **_: Any) -> None:
        counts.put(os.getpid())
        time.sleep(0.5)
        write_fake_engine(output)

    engine_cache.build_engine = build
    resolve_model(checkpoint)


def test_two_processes_do_not_build_the_same_engine_twice(cache: Path, checkpoint: Path) -> None:
    context = multiprocessing.get_context("fork")
    counts = context.Queue()
    processes = [context.Process(target=_resolve, args=(checkpoint, counts)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert counts.get(timeout=5)
    assert counts.empty()


def test_a_cache_that_cannot_be_written_is_a_sentence(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PELTON_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="set PELTON_CACHE to a folder"):
        resolve_model(checkpoint)


def test_a_cache_folder_that_turned_read_only_is_the_same_sentence(
    cache: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "engines").mkdir(parents=True)

    def read_only(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.suffix == ".lock":
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return opened(path, *args, **kwargs)

    opened = Path.open
    monkeypatch.setattr(Path, "open", read_only)
    with pytest.raises(ConfigError, match=r"engines cannot be written \(Read-only file system\)"):
        resolve_model(checkpoint)


def test_a_hub_id_is_asked_of_the_hub_each_time(
    cache: Path, checkpoint: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    calls: list[dict[str, Any]] = []

    def fetch(hub_id: str, **options: Any) -> str:
        calls.append(options)
        return str(checkpoint)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    said: list[str] = []
    engines = {resolve_model("someone/some-model", notify=said.append).engine for _ in range(2)}
    assert (len(engines), len(builds), len(calls)) == (1, 1, 2)
    # Cached files alone may be those of a download that was cut off.
    assert not any(options.get("local_files_only") for options in calls)
    assert said[0] == "fetching someone/some-model from the hub, or its cache"


def test_names_are_told_apart(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "llama"
    folder.mkdir()
    with pytest.raises(CheckpointError, match=r"neither an engine .* nor a checkpoint"):
        classify("llama")
    (folder / "config.json").write_text("{}")
    assert classify("llama") == "folder"
    (folder / "manifest.json").write_text("{}")
    assert classify(folder) == "engine"
    assert classify("model.gguf") == "gguf"
    assert classify("HuggingFaceTB/SmolLM2-135M-Instruct") == "hub"
    for missing in ("./a/b", "/a/b", "a", "a/b/c", "org/model.gguf", "a/b.engine"):
        with pytest.raises(CheckpointError, match="there is no"):
            classify(missing)


def test_the_cache_folder_follows_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PELTON_CACHE", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x/cache")
    assert engine_cache.cache_dir() == Path("/x/cache/pelton")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert engine_cache.cache_dir() == Path("/home/somebody/.cache/pelton")
    monkeypatch.setattr("sys.platform", "darwin")
    assert engine_cache.cache_dir() == Path("/home/somebody/Library/Caches/pelton")
    monkeypatch.setenv("PELTON_CACHE", "~/engines")
    assert engine_cache.cache_dir() == Path("/home/somebody/engines")
    monkeypatch.setenv("PELTON_CACHE", "~nobody-by-this-name/engines")
    assert engine_cache.cache_dir() == Path("~nobody-by-this-name/engines")
