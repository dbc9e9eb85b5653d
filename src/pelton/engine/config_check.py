"""What any user's ``BuildConfig`` must hold: values of its fields' types, a share of memory that is one."""

from __future__ import annotations

import typing

import msgspec

from pelton.engine.config import BuildConfig
from pelton.errors import ConfigError

#: How a type is called.
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}


def check_settings(config: BuildConfig) -> None:
    """Raise ``ConfigError`` naming the first setting that no model and no machine could have."""
    for name, hint in typing.get_type_hints(BuildConfig).items():
        value = getattr(config, name)
        # Which modes a pass has is said by name, where passes are known.
        kind = dict[str, str] if name == "passes" else hint
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            words = _WORDS.get(next(iter(typing.get_args(hint))), "OptimizationProfiles")
            if typing.get_origin(hint) is dict:
                words = "a dict of texts"
            raise ConfigError(f"{name} must be {words}, not {value!r}") from error
    if config.gpu_memory_fraction is not None:
        check_gpu_memory_fraction(config.gpu_memory_fraction)


def check_gpu_memory_fraction(fraction: float) -> None:
    """Raise ``ConfigError`` for what is no share."""
    if not 0 < fraction <= 1:
        raise ConfigError(f"gpu_memory_fraction must be above 0 and at most 1, not {fraction}")
