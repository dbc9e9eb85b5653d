"""Times an engine's instructions while it prefills prompts and decodes after them.

Every step is run several times over the same KV slots: as it is served, and with a clock read at each
instruction. What the second takes besides its instructions is the host's share of a step: checks,
staging, the call, waking the threads. On a GPU the clock is the GPU's own, and the host's share is what a
served step takes beyond its instructions.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pelton.engine.batch import InputBatch
from pelton.engine.batch_sampling import greedy
from pelton.engine.config import EngineConfig
from pelton.engine.cost import Cost, StepShape, step_costs
from pelton.engine.pieces import Piece, make_batch
from pelton.engine.session import Session
from pelton.errors import ConfigError, EngineError

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """One step, timed."""

    phase: str
    """prefill or decode."""
    shape: StepShape
    plain: float
    """Seconds of ``Session.run`` without profiling."""
    wall: float
    """The same with it."""
    seconds: npt.NDArray[np.float64]
    """By instruction."""
    costs: list[Cost]
    """By instruction."""


@dataclass(frozen=True, kw_only=True)
class PhaseProfile:
    """The steps of a phase as one: of prefill their sum (the whole prompt, in chunks), of decode the
    median step."""

    phase: str
    steps: int
    tokens: int
    """Tokens computed: of the whole prompts, or of one decode step."""
    logits: int
    """Rows of logits of the last step."""
    plain: float
    wall: float
    seconds: npt.NDArray[np.float64]
    costs: list[Cost]

    @property
    def host(self) -> float:
        """Seconds that were not in an instruction."""
        return max(0.0, self.wall - float(self.seconds.sum()))


def profile_session(session: Session, prompts: Sequence[Tokens], steps: int) -> list[StepProfile]:
    """Prefill ``prompts`` (batched, in chunks of ``max_num_tokens``), then decode ``steps`` tokens each.

    The session's cache must hold them (``blocks_needed``); its contents are overwritten. Raises
    ``ConfigError`` when the engine's limits do not allow it, ``EngineError`` on the reference runner.
    """
    if session.native_plan is None and not session.samples:
        raise EngineError(
            "profiles are of the native CPU runner and of GPUs, and this engine runs on the "
            f"{session.runner_name} runner here; use an engine for CPUs where the native library is"
        )
    _check_limits(session, prompts, steps)
    blocks = _block_tables(session, prompts, steps)
    _step(session, "warm", [p[:1] for p in prompts], [0] * len(prompts), blocks)
    done = [0] * len(prompts)
    found = []
    limit = session.config.build.max_num_tokens
    assert limit is not None
    while any(d < p.size for d, p in zip(done, prompts, strict=True)):
        room, new = limit, []
        for d, p in zip(done, prompts, strict=True):
            new.append(p[d : d + room])
            room -= new[-1].size
        found.append(_step(session, "prefill", new, done, blocks)[0])
        done = [d + n.size for d, n in zip(done, new, strict=True)]
    tokens = [p[-1:] for p in prompts]
    for _ in range(steps):
        step, tokens = _step(session, "decode", tokens, done, blocks)
        found.append(step)
        done = [d + 1 for d in done]
    return found


def phases(steps: Sequence[StepProfile]) -> list[PhaseProfile]:
    """Prefill and decode of ``profile_session``'s steps, where there are any."""
    found = []
    for phase in ("prefill", "decode"):
        own = [s for s in steps if s.phase == phase]
        if not own:
            continue
        times = np.stack([np.array([s.plain, s.wall, *s.seconds]) for s in own])
        plain, wall, *seconds = times.sum(axis=0) if phase == "prefill" else np.median(times, axis=0)
        # A decode step grows by a key per sequence: the middle one stands for all.
        counted = own if phase == "prefill" else [own[len(own) // 2]]
        costs = [sum(parts, Cost()) for parts in zip(*(s.costs for s in counted), strict=True)]
        found.append(
            PhaseProfile(
                phase=phase,
                steps=len(own),
                tokens=sum(sum(s.shape.new) for s in counted),
                logits=counted[-1].shape.logits,
                plain=float(plain),
                wall=float(wall),
                seconds=np.array(seconds),
                costs=costs,
            )
        )
    return found


def blocks_needed(config: EngineConfig, prompts: Sequence[Tokens], steps: int) -> int:
    """KV blocks that ``profile_session`` uses."""
    size = config.build.block_size
    assert size is not None
    return sum(-(-(p.size + steps) // size) for p in prompts)


def _check_limits(session: Session, prompts: Sequence[Tokens], steps: int) -> None:
    build = session.config.build
    assert build.max_batch_size and build.max_seq_len
    if not 1 <= len(prompts) <= build.max_batch_size:
        raise ConfigError(
            f"the engine takes 1 to {build.max_batch_size} sequences (max_batch_size), not {len(prompts)}"
        )
    longest = max(p.size for p in prompts)
    if min(p.size for p in prompts) < 1:
        raise ConfigError("a prompt has no tokens; give at least one")
    if longest + steps > build.max_seq_len:
        raise ConfigError(
            f"a prompt of {longest} tokens and {steps} steps are beyond the engine's {build.max_seq_len} "
            "tokens (max_seq_len); use a shorter prompt or fewer steps"
        )


def _block_tables(session: Session, prompts: Sequence[Tokens], steps: int) -> list[Tokens]:
    """Blocks of each sequence, one after another."""
    size = session.config.build.block_size
    assert size is not None
    tables, first = [], 0
    for p in prompts:
        count = -(-(p.size + steps) // size)
        tables.append(np.arange(first, first + count, dtype=np.int32))
        first += count
    return tables


def _step(
    session: Session, phase: str, new: Sequence[Tokens], done: Sequence[int], blocks: Sequence[Tokens]
) -> tuple[StepProfile, list[Tokens]]:
    """Run a step plainly and profiled; also the likeliest next token of each sequence."""
    live = [i for i, n in enumerate(new) if n.size]
    pieces = [Piece(tokens=new[i], start=done[i], blocks=blocks[i]) for i in live]
    ends = np.cumsum([p.tokens.size for p in pieces]) - 1
    batch = make_batch(pieces, session.config, ends.tolist())
    shape = StepShape(
        new=tuple(p.tokens.size for p in pieces),
        keys=tuple(p.start + p.tokens.size for p in pieces),
        logits=len(pieces),
    )
    timed = _on_cpu if session.native_plan is not None else _on_gpu
    plain, wall, seconds, tokens = timed(session, batch)
    step = StepProfile(
        phase=phase,
        shape=shape,
        plain=plain,
        wall=wall,
        seconds=seconds,
        costs=step_costs(session.engine.plan, shape),
    )
    return step, [token.reshape(1).astype(np.int32) for token in tokens]


_Timed = tuple[float, float, npt.NDArray[np.float64], npt.NDArray[np.integer]]
"""Seconds served and profiled, seconds by instruction, next tokens."""


def _on_cpu(session: Session, batch: InputBatch) -> _Timed:
    plan = session.native_plan
    assert plan is not None
    start = time.perf_counter()
    session.run(batch)
    middle = time.perf_counter()
    plan.start_profile()
    try:
        begin = time.perf_counter()
        logits_NV = session.run(batch).logits_NV
        wall = time.perf_counter() - begin
        seconds = np.array([t.seconds for t in plan.profile()])
    finally:
        plan.stop_profile()
    return middle - start, wall, seconds, logits_NV.argmax(axis=1)


def _on_gpu(session: Session, batch: InputBatch) -> _Timed:
    sampling = greedy(len(batch.logits_indices_N))
    for _ in range(2):  # the first loads kernels and captures the step's graph
        start = time.perf_counter()
        tokens = session.submit(batch, sampling).tokens()
        plain = time.perf_counter() - start
    times = session.profile_step(batch)
    assert times is not None
    seconds = np.array(times)
    return plain, max(plain, float(seconds.sum())), seconds, tokens
