"""A build configuration goes to another process as flags, and is the same there."""

from __future__ import annotations

import types
import typing
from typing import Any

import click
import msgspec
import pytest

from pelton.engine.config import BuildConfig
from pelton.engine.shapes import DimRange, OptimizationProfile
from pelton.serving.cli.config_flags import config_flags
from pelton.serving.cli.options import build_options


def parsed(flags: list[str]) -> BuildConfig:
    """What a command with the flags of a build gets."""
    got: list[BuildConfig] = []

    @click.command()
    @build_options
    def command(config: BuildConfig) -> None:
        got.append(config)

    command.main(flags, standalone_mode=False)
    return got[0]


PROFILES = (
    OptimizationProfile(dims={"T": DimRange(1, 1, 8), "B": DimRange(1, 2, 8)}),
    OptimizationProfile(dims={"T": DimRange(1, 256, 512)}),
)


def values(kind: Any) -> list[Any]:
    """Of a field of this type: what flags could get wrong."""
    if isinstance(kind, types.UnionType):
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    if typing.get_origin(kind) is dict:
        return [{"fuse_qkv": "off"}, {"fuse_qkv": "off", "cse": "force"}]
    if typing.get_origin(kind) is tuple:
        return [PROFILES[:1], PROFILES]
    return {bool: [True, False], int: [0, 7, -1], float: [0.1, 1 / 3], str: ["cpu", "a b=c"]}[kind]


HINTS = typing.get_type_hints(BuildConfig)
CASES = [(name, value) for name in BuildConfig.__struct_fields__ for value in values(HINTS[name])]


@pytest.mark.parametrize(("name", "value"), CASES)
def test_every_field_comes_back_from_its_flags(name: str, value: Any) -> None:
    config = BuildConfig(**{name: value})
    flags = config_flags(config)
    assert flags
    assert parsed(flags) == config


def test_all_fields_together_come_back() -> None:
    config = BuildConfig(**dict(CASES))
    assert all(
        value for value in msgspec.structs.asdict(config).values() if not isinstance(value, bool | int)
    )
    assert parsed(config_flags(config)) == config
    assert config_flags(BuildConfig()) == []


def test_benchs_process_gets_the_benchs_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    from pelton.serving.cli import bench

    commands: list[list[str]] = []
    monkeypatch.setattr(bench.subprocess, "run", lambda command, **_: commands.append(command))
    config = BuildConfig(passes={"cse": "off"}, fast_build=False, profiles=PROFILES)
    bench._start("m.engine", config, trust=True)
    (command,) = commands
    assert command[1:5] == ["-m", "pelton", "run", "m.engine"]
    assert [f for f in command if f.startswith("--")] == [
        *("--max-tokens", "--no-fast-build", "--pass=cse=off"),
        *(f"--profile={p}" for p in PROFILES),
        "--trust",
    ]
