"""Build settings given for an engine that exists: lower a limit, or contradict it (an error).

An engine's memory and plan are made for its limits, so any limit may be lowered when it is run, and
none raised. What is compiled into it (block size, types) cannot change; naming the value it has is
fine. What belongs to the session (threads) may be anything.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from pelton.engine.config import BuildConfig, EngineConfig
from pelton.engine.config_check import check_settings
from pelton.errors import ConfigError

#: What belongs to a session, not to the engine.
OF_THE_SESSION = ("threads", "gpu_memory_fraction")
#: Limits that an engine can be run below.
LOWERABLE = ("max_batch_size", "max_seq_len", "max_num_tokens", "max_input_len")


def of_the_session(given: BuildConfig) -> BuildConfig:
    """Only what belongs to the session."""
    return BuildConfig(**{name: getattr(given, name) for name in OF_THE_SESSION})


def apply_overrides(config: EngineConfig, given: BuildConfig, engine: Path) -> EngineConfig:
    """``config`` with the limits of ``given``.

    Raises ``ConfigError`` naming the first setting that contradicts the engine."""
    check_settings(given)
    changes: dict[str, int] = {}
    for name in BuildConfig.__struct_fields__:
        wanted, built = getattr(given, name), getattr(config.build, name)
        if wanted in (None, {}) or wanted == built or name in OF_THE_SESSION:
            continue
        if name not in LOWERABLE:
            raise ConfigError(
                f"{engine} was built with {name} {built}, so it cannot run with {wanted}; "
                f"leave the setting out, or build another engine with {name}={wanted}."
            )
        if wanted < 1:
            raise ConfigError(f"{name} must be 1 or more, not {wanted}.")
        if wanted > built:
            raise ConfigError(
                f"{engine} was built for {name} {built}: it can be run with less, not with {wanted}; "
                f"build another engine with {name}={wanted}."
            )
        changes[name] = wanted
    if not changes:
        return config
    longest = changes.get("max_seq_len", config.build.max_seq_len)
    if longest is not None and "max_seq_len" in changes and "max_input_len" not in changes:
        changes["max_input_len"] = min(config.build.max_input_len or longest, longest - 1) or 1
    return msgspec.structs.replace(config, build=msgspec.structs.replace(config.build, **changes))
