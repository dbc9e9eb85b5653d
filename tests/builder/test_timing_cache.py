"""The timing cache's file: read, written, merged, and refused where it does not hold."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pelton.builder.timing_cache import (
    TimedOn,
    TimingCache,
    encode,
    merge,
    open_timing_cache,
    read_timing_cache,
    update_timing_cache,
    write_timing_cache,
)
from pelton.errors import ConfigError

HERE = TimedOn(cpu="EPYC", cpu_level="avx2", cores=2, native_abi=1, library="abc", pelton="0.1.0")
A = TimingCache(timed_on=HERE, entries={"linear x": {"fast": 1.5, "wrong": None}, "linear y": {"fast": 2.0}})
B = TimingCache(timed_on=HERE, entries={"linear y": {"fast": 9.0}, "linear z": {"fast": 3.0}})


def test_a_file_gives_back_what_was_written_and_equal_caches_are_equal_bytes(tmp_path: Path) -> None:
    write_timing_cache(tmp_path / "c.json", A)
    assert read_timing_cache(tmp_path / "c.json") == A
    backwards = {k: dict(reversed(v.items())) for k, v in reversed(A.entries.items())}
    assert encode(TimingCache(timed_on=HERE, entries=backwards)) == encode(A)
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]


def test_no_file_is_an_empty_cache(tmp_path: Path) -> None:
    assert open_timing_cache(tmp_path / "none.json", HERE).entries == {}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("cpu", "Xeon", "CPU Xeon instead of EPYC"),
        ("cpu_level", "avx512", "CPU level avx512 instead of avx2"),
        ("cores", 64, "number of cores 64 instead of 2"),
        ("native_abi", 2, "native ABI 2 instead of 1"),
        ("library", "def", "native library def instead of abc"),
        ("pelton", "0.2.0", "Pelton 0.2.0 instead of 0.1.0"),
    ],
)
def test_times_from_elsewhere_are_refused_with_the_difference(
    tmp_path: Path, field: str, value: object, message: str
) -> None:
    other = msgspec.structs.replace(HERE, **{field: value})
    write_timing_cache(tmp_path / "c.json", msgspec.structs.replace(A, timed_on=other))
    with pytest.raises(
        ConfigError, match=f"does not hold here: it was measured with {message}; give another"
    ):
        open_timing_cache(tmp_path / "c.json", HERE)
    with pytest.raises(ConfigError, match="do not belong together"):
        merge(A, read_timing_cache(tmp_path / "c.json"))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"entries": {}}', b"\xff\xfe", b'{"timed_on": 3}'])
def test_a_file_that_is_no_cache_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "c.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"c\.json is no timing cache"):
        open_timing_cache(tmp_path / "c.json", HERE)


@pytest.mark.parametrize("time", ["-1.0", "0", "1e999", "NaN", '"1"'])
def test_times_that_nothing_can_take_are_refused(tmp_path: Path, time: str) -> None:
    (tmp_path / "c.json").write_bytes(encode(A).replace(b"1.5", time.encode()))
    with pytest.raises(ConfigError, match=r"c\.json is no timing cache"):
        open_timing_cache(tmp_path / "c.json", HERE)


def test_a_cache_that_could_not_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    assert open_timing_cache(tmp_path / "new.json", HERE) == TimingCache(timed_on=HERE)
    with pytest.raises(ConfigError, match=r"there is no folder .*none for the timing cache c\.json"):
        open_timing_cache(tmp_path / "none" / "c.json", HERE)


def test_merging_keeps_the_first_ones_times_whole() -> None:
    merged = merge(A, B)
    assert merged.entries == {**A.entries, "linear z": {"fast": 3.0}}
    assert merge(B, A).entries["linear y"] == {"fast": 9.0}


def test_an_update_keeps_what_others_wrote_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    update_timing_cache(path, B)
    update_timing_cache(path, A)
    assert read_timing_cache(path) == merge(A, B)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the timing cache .*missing/c\.json cannot be written"):
        write_timing_cache(tmp_path / "missing" / "c.json", A)
