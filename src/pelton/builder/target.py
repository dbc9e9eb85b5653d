"""What an engine is built for: the CPU, or an NVIDIA GPU architecture."""

from __future__ import annotations

import re

from pelton.dtypes import GPU_BLOCK_TYPES, NATIVE_BLOCK_TYPES
from pelton.errors import ConfigError, PeltonError
from pelton.kernels.gpu.driver import Device

CPU = "cpu"
#: Oldest architecture: bfloat16 tensor cores and asynchronous copies.
MIN_SM = 80
DEFAULT_SM = 90


def device_of(target: str) -> str:
    """``cpu`` or ``cuda``: the kind of device that tactics are for."""
    return CPU if target == CPU else "cuda"


def block_types(target: str) -> tuple[str, ...]:
    """Block types that the target's kernels read."""
    return NATIVE_BLOCK_TYPES if target == CPU else GPU_BLOCK_TYPES


def sm_of(target: str) -> int:
    """Compute capability of a GPU target: 90 of ``sm_90``."""
    return int(target.removeprefix("sm_"))


def gpu_available() -> bool:
    """Whether this machine has an NVIDIA GPU with a driver that works."""
    try:
        Device()
    except PeltonError:
        return False
    return True


def device_here(target: str) -> Device | None:
    """This machine's GPU, where it runs engines for the GPU ``target``."""
    try:
        device = Device()
    except PeltonError:
        return None
    sm = sm_of(target)
    return device if device.sm // 10 == sm // 10 and sm <= device.sm else None


def resolve_target(wanted: str | None, notes: list[str]) -> str:
    """The target's name. Raises ``ConfigError``."""
    if wanted is None or wanted == CPU:
        return CPU
    if wanted == "cuda":
        try:
            found = Device().sm
        except PeltonError:
            notes.append(f"there is no GPU here: target cuda is sm_{DEFAULT_SM}; name another as sm_NN")
            found = DEFAULT_SM
        wanted = f"sm_{found}"
    if not re.fullmatch(r"sm_\d{2,3}", wanted):
        raise ConfigError(f"unknown target {wanted!r} (known: cpu, cuda, sm_{MIN_SM} and later)")
    if sm_of(wanted) < MIN_SM:
        raise ConfigError(f"target {wanted} is too old: the GPU kernels need sm_{MIN_SM} or later; use cpu")
    return wanted
