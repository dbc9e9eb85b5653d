"""``pelton timing-cache``, and the flags of ``pelton build`` that choose tactics."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from pelton.builder.timing_cache import TimedOn, TimingCache, read_timing_cache, write_timing_cache
from pelton.engine.config import BuildConfig
from pelton.engine.shapes import DimRange, OptimizationProfile
from pelton.serving.cli.options import build_options
from tests.cli.conftest import Run

HERE = TimedOn(cpu="EPYC", cpu_level="avx2", cores=2, native_abi=1, library="abc", pelton="0.1.0")
A = TimingCache(timed_on=HERE, entries={"linear x": {"fast": 1.5, "slow": 20.0, "broken": None}})
B = TimingCache(timed_on=HERE, entries={"linear x": {"fast": 9.0}, "linear y": {"fast": 3.0}})


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    write_timing_cache(tmp_path / "a.json", A)
    write_timing_cache(tmp_path / "b.json", B)
    return tmp_path / "a.json", tmp_path / "b.json"


def test_show_says_where_it_was_measured_and_lists_the_fastest_first(
    run: Run, files: tuple[Path, Path]
) -> None:
    result = run("timing-cache", "show", files[0])
    assert result.code == 0
    assert "EPYC, avx2, 2 cores" in result.out
    assert "no: " in result.out  # another library than the one here
    lines = result.out.splitlines()
    assert [line.split()[-1] for line in lines[lines.index("linear x") + 1 :]] == ["fast", "slow", "broken"]
    assert lines[-1].split() == ["wrong", "broken"]


def test_merge_writes_all_calls_and_keeps_the_first_ones_times(
    run: Run, files: tuple[Path, Path], tmp_path: Path
) -> None:
    result = run("timing-cache", "merge", *files, "-o", tmp_path / "all.json")
    assert (result.code, result.out) == (0, f"{tmp_path / 'all.json'}: 2 calls\n")
    assert read_timing_cache(tmp_path / "all.json").entries == {**B.entries, **A.entries}


def test_what_does_not_merge_is_a_sentence_that_names_the_file(
    run: Run, files: tuple[Path, Path], tmp_path: Path
) -> None:
    other = TimingCache(
        timed_on=TimedOn(**{**{f: getattr(HERE, f) for f in HERE.__struct_fields__}, "cores": 9})
    )
    write_timing_cache(files[1], other)
    result = run("timing-cache", "merge", *files, "-o", tmp_path / "all.json")
    assert result.code == 2
    assert "b.json: these timing caches do not belong together" in result.err
    assert "number of cores 9 instead of 2" in result.err
    assert not (tmp_path / "all.json").exists()
    missing = run("timing-cache", "show", tmp_path / "none.json")
    assert (missing.code, missing.err) == (2, f"pelton: there is no timing cache {tmp_path / 'none.json'}\n")


def parsed(*args: str) -> BuildConfig:
    found: list[BuildConfig] = []

    @click.command()
    @build_options
    def command(config: BuildConfig) -> None:
        found.append(config)

    command.main(list(args), standalone_mode=False)
    return found[0]


def test_the_flags_of_build_are_the_settings() -> None:
    config = parsed(
        *("--profile", "T=1:1:8,B=1:1:8", "--profile", "T=9:64:512", "--opt-num-tokens", "4"),
        *("--plugin", "linear=auto", "--plugin", "rope=disable", "--no-timing", "--cpu-level", "avx2"),
    )
    assert config == BuildConfig(
        profiles=(
            OptimizationProfile(dims={"T": DimRange(1, 1, 8), "B": DimRange(1, 1, 8)}),
            OptimizationProfile(dims={"T": DimRange(9, 64, 512)}),
        ),
        opt_num_tokens=4,
        plugins={"linear": "auto", "rope": "disable"},
        timing=False,
        cpu_level="avx2",
    )
    assert parsed() == BuildConfig()


def test_a_profile_that_cannot_be_read_is_a_sentence(run: Run) -> None:
    result = run("build", "model", "--profile", "T=8")
    assert result.code == 2
    assert "'T=8' is not NAME=MIN:OPT:MAX, such as T=1:1:8,B=1:1:8" in result.err
