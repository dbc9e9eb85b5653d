"""What an engine is built for: the CPU, or an NVIDIA GPU architecture."""

from __future__ import annotations

import difflib
import re

from pelton.dtypes import GPU_BLOCK_TYPES, NATIVE_BLOCK_TYPES
from pelton.errors import ConfigError, PeltonError
from pelton.kernels.gpu.driver import Device

CPU = "cpu"
#: Oldest architecture: bfloat16 tensor cores and asynchronous copies.
MIN_SM = 80
DEFAULT_SM = 90
#: What NVRTC 13 and Triton compile for. A name that is none of these is a slip: their compilers would
#: end the process over it.
KNOWN_SM = (80, 86, 87, 89, 90, 100, 103, 110, 120, 121)


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
    return _device() is not None


def _device() -> Device | None:
    try:
        return Device()
    except PeltonError:
        return None


def device_here(target: str) -> Device | None:
    """This machine's GPU, where it runs engines for the GPU ``target``."""
    device, sm = _device(), sm_of(target)
    return device if device is not None and device.sm // 10 == sm // 10 and sm <= device.sm else None


def why_not_here(target: str) -> str | None:
    """Why this machine runs no engines for the GPU ``target``; None where it does."""
    if device_here(target) is not None:
        return None
    device = _device()
    return "there is no GPU" if device is None else f"the GPU ({device.name}) is of sm_{device.sm}"


def resolve_target(wanted: str | None, notes: list[str]) -> str:
    """The target's name. Raises ``ConfigError``."""
    if wanted is None or wanted == CPU:
        return CPU
    if wanted == "cuda":
        device = _device()
        if device is None:
            notes.append(f"there is no GPU here: target cuda is sm_{DEFAULT_SM}; name another as sm_NN")
            return f"sm_{DEFAULT_SM}"
        wanted = f"sm_{device.sm}"  # its compilers may know it where this list does not
    elif wanted not in (known := [CPU, "cuda", *(f"sm_{sm}" for sm in KNOWN_SM)]):
        if isinstance(wanted, str) and re.fullmatch(r"sm_[1-7]\d", wanted):
            raise ConfigError(_too_old(wanted))
        near = difflib.get_close_matches(str(wanted).lower(), known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"unknown target {wanted!r}{hint} (known: {', '.join(known)})")
    if sm_of(wanted) < MIN_SM:
        raise ConfigError(_too_old(wanted))
    return wanted


def _too_old(target: str) -> str:
    return f"target {target} is too old: the GPU kernels need sm_{MIN_SM} or later; use cpu"
