"""A ``BuildConfig`` as the flags that give it: ``options.build_options`` the other way round."""

from __future__ import annotations

import msgspec

from pelton.engine.config import BuildConfig
from pelton.serving.cli.options import flag_of


def config_flags(config: BuildConfig) -> list[str]:
    """Arguments from which a command with ``build_options`` makes ``config`` again: for a process of its
    own."""
    flags: list[str] = []
    for field in msgspec.structs.fields(config):
        flag, value = flag_of(field), getattr(config, field.name)
        if value is None:
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, dict):
            flags += [f"--{flag}={name}={setting}" for name, setting in value.items()]
        elif isinstance(value, tuple):
            flags += [f"--{flag}={item}" for item in value]
        else:
            flags.append(f"--{flag}={value}")
    return flags
