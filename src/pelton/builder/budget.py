"""The memory an engine will need, computed from shapes before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from pelton.builder.target import CPU, device_here
from pelton.engine.config import EngineConfig, KVGroup, MemoryPlan
from pelton.engine.cuda.placement import usable_memory
from pelton.engine.cuda.sampler import sampler_bytes
from pelton.engine.kv_cache import block_bytes, sequence_blocks
from pelton.engine.resources import available_memory, human_bytes
from pelton.errors import ConfigError

#: Share of the free memory beyond which a step's work memory is pointed out.
_LARGE_WORK = 0.1


def kv_bytes_per_token(groups: tuple[KVGroup, ...], kv_dtype: str) -> int:
    """Bytes that a token's keys and values take over all layers, windows not counted."""
    return sum(block_bytes(group, 1, kv_dtype) for group in groups)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What the engine will use where it will run, bytes."""

    config: EngineConfig
    free: int | None
    """What it may take there; None: there is no such GPU here to ask."""
    place: str
    """What has that memory: "this machine", or its GPU."""
    kv_tokens: int
    """Tokens the cache holds: ``max_batch_size`` x ``max_seq_len``, or what fits."""
    wanted_kv_tokens: int
    longest_context: int
    """Tokens of one sequence that would fit in ``free``, whatever ``max_seq_len`` is."""

    @property
    def memory(self) -> MemoryPlan:
        return self.config.memory

    @property
    def kv_bytes(self) -> int:
        return self.kv_tokens * self.memory.kv_bytes_per_token

    @property
    def work(self) -> int:
        return self.memory.work

    def text(self) -> str:
        """The budget in a sentence, for before anything is allocated."""
        needs = (
            f"needs weights {human_bytes(self.memory.weights)}, KV {human_bytes(self.kv_bytes)} "
            f"({self.kv_tokens} tokens), work {human_bytes(self.work)}"
        )
        if self.free is None:
            return f"{needs} of {self.place}'s memory; there is none here to say what is free"
        return (
            f"{needs} of {human_bytes(self.free)} free on {self.place}; one sequence of up to "
            f"{self.longest_context} tokens would fit"
        )

    def notes(self) -> list[str]:
        """Sentences for the report."""
        notes: list[str] = []
        if self.free is None:
            return notes
        if self.work > max(_LARGE_WORK * self.free, self.memory.weights):
            tokens = self.config.build.max_num_tokens or 0
            fewer = _tokens_within(self.config, int(_LARGE_WORK / 2 * self.free))
            notes.append(
                f"a step of {tokens} tokens needs {human_bytes(self.work)} of work memory, "
                f"{self.work / self.free:.0%} of what is free; {_limits(self.config, fewer)} needs "
                f"{human_bytes(self.work * fewer / tokens)}"
            )
        if self.kv_tokens == self.wanted_kv_tokens:
            return notes
        return [
            *notes,
            f"the KV cache will hold {self.kv_tokens} tokens on {self.place}: {self.wanted_kv_tokens} "
            f"(max_batch_size x max_seq_len) need "
            f"{human_bytes(self.wanted_kv_tokens * self.memory.kv_bytes_per_token)}",
        ]


def plan_budget(config: EngineConfig, free: int | None = None) -> Budget:
    """The budget of ``config`` with ``free`` bytes (default: what its target has here).

    Raises ``ConfigError`` naming what is needed, what is free and the setting that would fit, when
    weights, work memory and one sequence of ``max_seq_len`` do not fit together.
    """
    build, memory = config.build, config.memory
    assert build.max_batch_size and build.max_seq_len and build.block_size
    place = "this machine"
    if free is None:
        free, place = _target_memory(config)
    one = sequence_blocks(config) * build.block_size
    wanted = one * build.max_batch_size
    if free is None:
        return Budget(
            config=config,
            free=None,
            place=place,
            kv_tokens=wanted,
            wanted_kv_tokens=wanted,
            longest_context=config.model.max_position_embeddings,
        )
    rest = free - memory.weights - memory.work
    context = max(0, rest) // memory.kv_bytes_per_token // build.block_size * build.block_size
    if context < one:
        raise ConfigError(_refusal(config, free, rest, context, place))
    return Budget(
        config=config,
        free=free,
        place=place,
        kv_tokens=min(wanted, context),
        wanted_kv_tokens=wanted,
        longest_context=min(context, config.model.max_position_embeddings),
    )


def _target_memory(config: EngineConfig) -> tuple[int | None, str]:
    """Bytes that an engine for ``config``'s target may take here besides what sampling takes, and of what."""
    build = config.build
    target, fraction = str(build.target or CPU), build.gpu_memory_fraction
    if target == CPU:
        return available_memory(), "this machine"
    device = device_here(target)
    if device is None:
        return None, f"a GPU of {target}"
    assert fraction is not None
    assert build.max_batch_size
    sampling = sampler_bytes(build.max_batch_size, build.max_batch_size, config.model.vocab_size)
    return max(0, usable_memory(device, fraction) - sampling), device.name


def _tokens_within(config: EngineConfig, nbytes: int) -> int:
    """Tokens of a step whose work memory takes ``nbytes``: buffers grow with the tokens."""
    build = config.build
    assert build.max_num_tokens and build.block_size
    work = config.memory.work
    tokens = max(0, nbytes) * build.max_num_tokens // max(1, work)
    return tokens // build.block_size * build.block_size


def _limits(config: EngineConfig, tokens: int) -> str:
    """The settings for steps of ``tokens`` tokens: no sequence may be without one."""
    batch = f" with max_batch_size {tokens}" if tokens < (config.build.max_batch_size or 0) else ""
    return f"max_num_tokens {tokens}{batch}"


def _refusal(config: EngineConfig, free: int, rest: int, context: int, place: str) -> str:
    build, memory = config.build, config.memory
    assert build.max_seq_len and build.max_num_tokens
    work = memory.work
    needed = memory.weights + work + build.max_seq_len * memory.kv_bytes_per_token
    what = (
        f"{config.model.name} needs {human_bytes(needed)}: weights {human_bytes(memory.weights)}, work "
        f"{human_bytes(work)}, KV cache of one sequence of {build.max_seq_len} tokens "
        f"{human_bytes(build.max_seq_len * memory.kv_bytes_per_token)}; {human_bytes(free)} are free on "
        f"{place}. "
    )
    fits: list[str] = []
    if context >= 2 * build.max_num_tokens or context >= 1024:
        fits.append(f"max_seq_len {context}")
    if build.dtype == "float32" and rest + memory.weights // 2 > 0:
        fits.append("dtype bfloat16 (if the weights are not block-quantised)")
    if build.kv_dtype == "float32" and rest >= build.max_seq_len * memory.kv_bytes_per_token // 2:
        fits.append("kv_dtype float16")
    sequence = build.max_seq_len * memory.kv_bytes_per_token
    fewer = _tokens_within(config, free - memory.weights - sequence)
    if build.block_size and build.block_size <= fewer < build.max_num_tokens:
        fits.append(_limits(config, fewer))
    fits.append(f"a smaller checkpoint, or {human_bytes(needed - free)} more free memory")
    return what + "Fits with: " + "; ".join(fits) + "."
