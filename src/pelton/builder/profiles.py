"""Optimisation profiles made whole and held to each other, and the buckets derived from them.

A *bucket* is the unit of choice: steps of more tokens than the bucket before and at most
``max_tokens`` run the same tactics, which are timed at the bucket's optimal sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pelton.engine.config import BuildConfig
from pelton.engine.shapes import DIM_MEANING, STEP_DIMS, DimRange, OptimizationProfile
from pelton.errors import ConfigError

#: Buckets widen by about this factor: within one the best tactic rarely changes.
GROWTH = 8
#: Rows of logits of a step besides one of each sequence, unless a profile says so: for prompts whose
#: log-probabilities are wanted. A row has the whole vocabulary, and steps of more tokens are hardly faster.
PROMPT_ROWS = 512


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Steps of at most ``max_tokens`` tokens (and more than the bucket before)."""

    max_tokens: int
    dims: Mapping[str, int]
    """Sizes of T, B and N at which tactics are timed."""


def apply_limits(values: dict[str, Any]) -> None:
    """Let given profiles set ``max_num_tokens`` and ``max_batch_size`` where those are automatic.

    ``values`` has the fields of a ``BuildConfig``. Raises ``ConfigError`` for a profile that is not
    consistent in itself, or reaches beyond a limit that was given.
    """
    named = [_by_dimension(profile) for profile in values["profiles"] or ()]
    for setting, dim in (("max_num_tokens", "T"), ("max_batch_size", "B")):
        largest = max((p[dim].max for p in named if dim in p), default=None)
        if largest is None:
            continue
        if values[setting] is None:
            values[setting] = largest
        elif largest > values[setting]:
            raise ConfigError(
                f"a profile has {dim} up to {largest}, beyond {setting} {values[setting]}; change one of them"
            )


def resolve_profiles(values: dict[str, Any]) -> None:
    """Fill in ``profiles`` and ``opt_num_tokens``; the limits are known. In place.

    Raises ``ConfigError`` naming the inputs that disagree.
    """
    given: Sequence[OptimizationProfile] | None = values["profiles"]
    opt = values["opt_num_tokens"]
    if not given:
        _automatic(values)
        return
    whole = tuple(_complete(_by_dimension(profile), values) for profile in given)
    if opt is not None and opt not in (p.dims["T"].opt for p in whole):
        raise ConfigError(
            f"opt_num_tokens {opt} is the optimum of no profile; leave it out, a profile states its own"
        )
    _check_cover(whole, values["max_num_tokens"])
    values["profiles"] = whole
    values["opt_num_tokens"] = opt or whole[0].dims["T"].opt


def _automatic(values: dict[str, Any]) -> None:
    batch, tokens = values["max_batch_size"], values["max_num_tokens"]
    opt = values["opt_num_tokens"]
    if opt is None:
        opt = min(batch, tokens)  # every running sequence decodes
    elif not 1 <= opt <= tokens:
        raise ConfigError(f"opt_num_tokens {opt} is not between 1 and max_num_tokens {tokens}")
    values["opt_num_tokens"] = opt
    dims = {
        "T": DimRange(1, opt, tokens),
        "B": DimRange(1, batch, batch),
        "N": DimRange(1, batch, most_rows(batch, tokens)),
    }
    values["profiles"] = (OptimizationProfile(dims=dims),)


def most_rows(batch: int, tokens: int) -> int:
    """Rows of logits of a step, where nothing else is said."""
    return min(tokens, batch + PROMPT_ROWS)


def _by_dimension(profile: OptimizationProfile) -> dict[str, DimRange]:
    """The profile's ranges by dimension. Raises ``ConfigError`` where inputs that share one disagree."""
    found: dict[str, tuple[str, DimRange]] = {}
    for name, sizes in profile.dims.items():
        if not 1 <= sizes.min <= sizes.opt <= sizes.max:
            raise ConfigError(f"profile {profile}: {name}={sizes} must have 1 <= MIN <= OPT <= MAX")
        dim = _dimension(name, profile)
        if dim in found and found[dim][1] != sizes:
            other, before = found[dim]
            raise ConfigError(
                f"profile {profile}: {other} and {name} share dimension {dim} ({DIM_MEANING[dim]}), but one "
                f"has {before} and the other {sizes}; give {dim} once"
            )
        found[dim] = name, sizes
    return {dim: sizes for dim, (_, sizes) in found.items()}


def _dimension(name: str, profile: OptimizationProfile) -> str:
    for dim, inputs in STEP_DIMS.items():
        if name == dim or name.split(".")[0] in inputs:
            return dim
    known = "; ".join(f"{dim} ({', '.join(inputs)})" for dim, inputs in STEP_DIMS.items())
    raise ConfigError(
        f"profile {profile}: a step has no dimension or input {name!r} of dynamic size: {known}"
    )


def _complete(given: dict[str, DimRange], values: dict[str, Any]) -> OptimizationProfile:
    """All dimensions: absent ones as wide as the tokens allow, and N as ``most_rows``."""
    batch, tokens = values["max_batch_size"], values["max_num_tokens"]
    t = given.get("T", DimRange(1, min(batch, tokens), tokens))
    b = given.get("B", DimRange(1, min(batch, t.opt), min(batch, t.max)))
    n = given.get("N", DimRange(1, min(b.opt, t.opt), most_rows(b.max, t.max)))
    profile = OptimizationProfile(dims={"T": t, "B": b, "N": n})
    for dim, sizes in (("B", b), ("N", n)):
        what = f"{DIM_MEANING[dim]} ({', '.join(STEP_DIMS[dim])})"
        if sizes.max > t.max or sizes.opt > t.opt:
            raise ConfigError(
                f"profile {profile}: more {what} than {DIM_MEANING['T']} ({', '.join(STEP_DIMS['T'])}); "
                f"each needs a token of its own, so {dim} must not exceed T"
            )
    if n.max < b.max:
        raise ConfigError(
            f"profile {profile}: {b.max} sequences (block_table, seq_lens) want a row of logits each and "
            f"logits_indices has {n.max}; use N up to {b.max} or more"
        )
    return profile


def _check_cover(profiles: Sequence[OptimizationProfile], max_tokens: int) -> None:
    """Every step size has a profile. Raises ``ConfigError`` with the sizes that have none."""
    at = 1
    for t in sorted((p.dims["T"] for p in profiles), key=lambda t: t.min):
        if t.min > at:
            raise ConfigError(_gap(at, t.min - 1))
        at = max(at, t.max + 1)
    if at <= max_tokens:
        raise ConfigError(_gap(at, max_tokens) + f", or set max_num_tokens {at - 1}")


def _gap(first: int, last: int) -> str:
    sizes = f"{first} to {last} tokens" if first < last else "1 token" if first == 1 else f"{first} tokens"
    inputs = ", ".join(STEP_DIMS["T"])
    return f"no profile covers steps of {sizes} ({inputs}); widen T of one"


def buckets(config: BuildConfig) -> tuple[Bucket, ...]:
    """The buckets of a resolved configuration, ascending.

    They end at 1, at ``max_batch_size`` (a decode step's largest size), where a profile begins or ends,
    and in between wherever they would widen by more than twice ``GROWTH``. A bucket is timed at the
    optimum of its narrowest profile where that lies within, else at its largest size.
    """
    assert config.profiles and config.max_batch_size and config.max_num_tokens
    found, low = [], 1
    for high in _ends(config.profiles, config.max_batch_size, config.max_num_tokens):
        profile = min(
            (p for p in config.profiles if p.dims["T"].min <= high <= p.dims["T"].max),
            key=lambda p: p.dims["T"].max - p.dims["T"].min,
        )
        t = profile.dims["T"].opt if low <= profile.dims["T"].opt <= high else high
        b = min(t, profile.dims["B"].opt)
        n = min(t, profile.dims["N"].opt)
        found.append(Bucket(max_tokens=high, dims={"T": t, "B": b, "N": n}))
        low = high + 1
    return tuple(found)


def _ends(profiles: Sequence[OptimizationProfile], batch: int, tokens: int) -> list[int]:
    wanted = {1, batch, tokens}
    for profile in profiles:
        wanted |= {profile.dims["T"].min - 1, profile.dims["T"].max}
    ends: list[int] = []
    for end in sorted(e for e in wanted if 1 <= e <= tokens):
        # One that hardly differs from the next is not worth timing.
        while ends and ends[-1] * GROWTH * 2 < end:
            ends.append(ends[-1] * GROWTH)
        ends.append(end)
    return ends


def step_limits(config: BuildConfig) -> dict[str, int]:
    """Largest T, B and N over all profiles: what memory is planned for."""
    assert config.profiles
    return {dim: max(p.dims[dim].max for p in config.profiles) for dim in ("T", "B", "N")}
