"""Resolves a ``BuildConfig`` once: fills in what is automatic, says what it chose and why, and
refuses contradictions with the way out."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from pelton.builder.profiles import apply_limits, resolve_profiles
from pelton.builder.target import CPU, device_of, resolve_target, sm_of
from pelton.dtypes import KV_CODES, is_dense
from pelton.engine.config import BuildConfig
from pelton.engine.config_check import check_settings
from pelton.engine.resources import cores
from pelton.errors import ConfigError
from pelton.kernels import native
from pelton.kernels.cpu_levels import ANY, INCLUDES
from pelton.kernels.linear.packed import X_CODES
from pelton.kernels.tactic import FP8_SM, SMALL_STEPS
from pelton.passes import PASSES, Mode

MAX_SEQ_LEN = 8192
#: By kind of device: sequences and tokens in a step.
MAX_BATCH_SIZE = {"cpu": 8, "cuda": 256}
MAX_NUM_TOKENS = {"cpu": 512, "cuda": 4096}
#: Tokens, so sequences too, of the largest step: what no machine has memory for takes minutes to plan.
LARGEST_STEP = 1 << 20
GPU_MEMORY_FRACTION = 0.9
BLOCK_SIZE = 16
PROFILING = ("none", "names", "detailed")
BLOCK_SIZES = (8, 16, 32, 64, 128)
DTYPES = ("float32", "bfloat16", "float16")
ACCUMULATE = ("float32", "float16")
#: Compute capabilities of GeForce cards, whose tensor cores add in float32 at half the rate of float16.
GEFORCE = (86, 89, 120)
ACTIVATIONS = ("float32", "int8")
KV_DTYPES = ("float32", "float16", "bfloat16", *KV_CODES)
#: What products of 8-bit codes are for (``hopper_products.cu``).
_CODES_SM = 90
#: What users call them.
_KV_ALIASES = {"fp8": "float8_e4m3fn"}
MODEL_IMPLS = ("auto", "pelton", "transformers")


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    """What resolving depends on."""

    max_position_embeddings: int
    matrix_elements: Mapping[str, int]
    """Number of values of two-dimensional tensors by quant ("bfloat16", "q4_1", ...)."""
    quantised_inputs: frozenset[str] = frozenset()
    """Types to which the checkpoint says that inputs of products are quantised: int8, fp8."""

    @property
    def block_quantised(self) -> bool:
        return any(not is_dense(quant) for quant in self.matrix_elements)

    @property
    def dense_dtype(self) -> str | None:
        """The type most dense matrices have; None when there is none."""
        dense = {q: n for q, n in self.matrix_elements.items() if is_dense(q)}
        return max(dense, key=lambda q: dense[q]) if dense else None


def resolve(config: BuildConfig, facts: CheckpointFacts) -> tuple[BuildConfig, list[str]]:
    """``config`` without any ``None``, and a sentence for every automatic choice worth knowing.

    Raises ``ConfigError`` naming the setting, its value and what to do.
    """
    notes: list[str] = []
    values: dict[str, Any] = msgspec.structs.asdict(config)
    for name in (
        "max_batch_size",
        "max_seq_len",
        "max_num_tokens",
        "max_input_len",
        "block_size",
        "opt_num_tokens",
    ):
        _positive(name, values[name])
    check_settings(config)
    target = values["target"] = resolve_target(values["target"], notes)
    apply_limits(values)
    for name in ("max_batch_size", "max_num_tokens"):
        if (values[name] or 0) > LARGEST_STEP:
            raise ConfigError(f"{name} {values[name]} is beyond {LARGEST_STEP}, the largest step; use less")
    if values["max_batch_size"] is None:
        values["max_batch_size"] = MAX_BATCH_SIZE[device_of(target)]
    values["block_size"] = _choice("block_size", values["block_size"] or BLOCK_SIZE, BLOCK_SIZES)
    _resolve_lengths(values, facts, notes)
    _resolve_tokens(values, notes)
    resolve_profiles(values)
    _resolve_types(values, facts, notes)
    _resolve_threads(values, notes)
    if values["gpu_memory_fraction"] is None:
        values["gpu_memory_fraction"] = GPU_MEMORY_FRACTION
    elif target == CPU:
        notes.append("gpu_memory_fraction is for GPU engines, and has no effect on a CPU")
    _resolve_deterministic(values)
    _resolve_accumulate(values, notes)
    _resolve_fast_build(values, notes)
    values["quant"] = values["quant"] or "none"
    values["profiling"] = _choice("profiling", values["profiling"] or "names", PROFILING)
    _resolve_target(values, notes)
    values["model_impl"] = check_model_impl(values["model_impl"])
    _resolve_passes(values)
    return BuildConfig(**values), notes


def check_model_impl(value: str | None) -> str:
    """The setting, ``auto`` where it is not set; raises ``ConfigError`` on an unknown one."""
    return str(_choice("model_impl", value or "auto", MODEL_IMPLS))


def _resolve_lengths(values: dict[str, Any], facts: CheckpointFacts, notes: list[str]) -> None:
    limit = facts.max_position_embeddings
    if values["max_seq_len"] is None:
        values["max_seq_len"] = min(limit, MAX_SEQ_LEN)
        if limit > MAX_SEQ_LEN:
            notes.append(
                f"max_seq_len is {MAX_SEQ_LEN} of the model's {limit} tokens, to bound the KV cache; "
                "set max_seq_len for more"
            )
    elif values["max_seq_len"] > limit:
        raise ConfigError(
            f"max_seq_len {values['max_seq_len']} is beyond the model's {limit} positions; "
            f"use max_seq_len {limit} or less"
        )
    elif values["max_seq_len"] < 2:
        raise ConfigError("max_seq_len 1 leaves no room for an answer; use 2 or more")
    longest = values["max_seq_len"] - 1
    if values["max_input_len"] is None:
        values["max_input_len"] = longest
    elif values["max_input_len"] > longest:
        raise ConfigError(
            f"max_input_len {values['max_input_len']} leaves no room for an answer in max_seq_len "
            f"{values['max_seq_len']}; use max_input_len {longest} or less"
        )


def _resolve_tokens(values: dict[str, Any], notes: list[str]) -> None:
    batch, block = values["max_batch_size"], values["block_size"]
    if values["max_num_tokens"] is None:
        useful = batch * values["max_seq_len"]
        usual = MAX_NUM_TOKENS[device_of(values["target"])]
        values["max_num_tokens"] = max(batch, min(usual, useful))
        if batch > usual:
            notes.append(f"max_num_tokens is {batch}, so that each of max_batch_size sequences gets a token")
    elif values["max_num_tokens"] < batch:
        raise ConfigError(
            f"max_num_tokens {values['max_num_tokens']} is below max_batch_size {batch}, so not every "
            f"running sequence would get a token in a step; use max_num_tokens {batch} or more"
        )
    elif values["max_num_tokens"] < min(block, values["max_seq_len"]):
        raise ConfigError(
            f"max_num_tokens {values['max_num_tokens']} is below block_size {block}, so a step could not "
            f"fill a KV block; use max_num_tokens {block} or more"
        )


def _resolve_types(values: dict[str, Any], facts: CheckpointFacts, notes: list[str]) -> None:
    stored, asked = facts.dense_dtype, values["dtype"] is not None
    if not asked:
        # The checkpoint's own: all of its bits, and no more. Without dense matrices it does not matter.
        values["dtype"] = stored or "float32"
    elif _choice("dtype", values["dtype"], DTYPES) not in (stored, "float32") and stored is not None:
        notes.append(f"{stored} weights are rounded to {values['dtype']}, as dtype asks")
    if device_of(values["target"]) == "cuda":
        if not asked and facts.block_quantised and values["dtype"] == "float32":
            values["dtype"] = "bfloat16"  # no matrix is of float32
        _resolve_gpu_types(values, facts, notes)
        return
    if values["activations"] is None:
        values["activations"] = "int8" if facts.block_quantised else "float32"
        if facts.block_quantised:
            notes.append(
                "activations of block-quantised products are int8, for speed; "
                "activations float32 computes them exactly"
            )
    elif _choice("activations", values["activations"], ACTIVATIONS) == "int8" and not facts.block_quantised:
        values["activations"] = "float32"
        notes.append("activations are float32: int8 is for block-quantised weights, and there are none")
    exact = values["dtype"] == "float32" and values["activations"] == "float32"
    if values["kv_dtype"] is None:
        values["kv_dtype"] = "float32" if exact else "float16"
    _resolve_kv_dtype(values)


def _resolve_gpu_types(values: dict[str, Any], facts: CheckpointFacts, notes: list[str]) -> None:
    """On a GPU the network computes in the type of its matrices, and caches in it."""
    _resolve_gpu_activations(values, facts, notes)
    if values["kv_dtype"] is None:
        values["kv_dtype"] = values["dtype"]
    _resolve_kv_dtype(values)
    if values["kv_dtype"] == "float8_e4m3fn" and sm_of(values["target"]) < FP8_SM:
        raise ConfigError(
            f"kv_dtype fp8 needs a GPU that converts fp8, sm_{FP8_SM} or later, and target is "
            f"{values['target']}; use int8, which has as few bytes"
        )


def _resolve_kv_dtype(values: dict[str, Any]) -> None:
    wanted = values["kv_dtype"]
    if wanted not in KV_DTYPES:
        wanted = _KV_ALIASES.get(wanted) or _choice("kv_dtype", wanted, (*KV_DTYPES, *_KV_ALIASES))
    values["kv_dtype"] = wanted


def _resolve_gpu_activations(values: dict[str, Any], facts: CheckpointFacts, notes: list[str]) -> None:
    """Inputs are codes where the checkpoint says so of its products, or where that is asked for."""
    dtype, wanted = values["dtype"], values["activations"]
    able = {code for quant, code in X_CODES.items() if facts.matrix_elements.get(quant)}
    if sm_of(values["target"]) != _CODES_SM:
        able = set()
    if wanted is None:
        said = facts.quantised_inputs & able
        values["activations"] = next(iter(said)) if len(said) == 1 else dtype
        if len(said) == 1:
            notes.append(
                f"large steps quantise the inputs of products to {values['activations']}, as the checkpoint "
                f"does; activations {dtype} leaves them as they are"
            )
        elif facts.quantised_inputs:
            types = " and ".join(sorted(facts.quantised_inputs))
            notes.append(f"inputs of products stay {dtype}, which the checkpoint quantises to {types}")
    elif wanted not in (dtype, *able):
        known = ", ".join((dtype, *sorted(able)))
        raise ConfigError(
            f"activations {wanted!r} does not fit this build (known: {known}): on a GPU they have dtype, or, "
            f"on sm_{_CODES_SM}, are int8 or fp8 as weights with a scale a row, or fp8 ones a block, are"
        )


def _resolve_threads(values: dict[str, Any], notes: list[str]) -> None:
    threads, available = values["threads"], cores()
    if threads is None:
        values["threads"] = 0
    elif threads < 0:
        raise ConfigError(f"threads must be 0 (all cores) or more, not {threads}")
    elif threads > available:
        notes.append(f"{threads} threads on the {available} cores here run slower than {available}")


def _resolve_fast_build(values: dict[str, Any], notes: list[str]) -> None:
    values["fast_build"] = bool(values["fast_build"])
    if values["fast_build"]:
        if values["timing"]:
            raise ConfigError("timing contradicts fast_build, which times nothing; leave one of them out")
        notes.append("fast build: nothing is timed, only passes that take no time, and a check on one step")


def _resolve_deterministic(values: dict[str, Any]) -> None:
    if values["deterministic"] is None:
        values["deterministic"] = False
    elif values["deterministic"] and device_of(values["target"]) == "cpu":
        raise ConfigError("deterministic is for GPU engines so far; leave it out, or set target")


def _resolve_accumulate(values: dict[str, Any], notes: list[str]) -> None:
    values["accumulate"] = _choice("accumulate", values["accumulate"] or "float32", ACCUMULATE)
    if values["accumulate"] == "float32":
        return
    target, dtype, activations = values["target"], values["dtype"], values["activations"]
    if device_of(target) == "cpu":
        raise ConfigError("accumulate float16 is for GPU engines; leave it out, or set target")
    if dtype != "float16":
        raise ConfigError(
            f"accumulate float16 is for networks in float16, and this one computes in {dtype}, which tensor "
            "cores add in float32 alone; leave it out, or set dtype float16"
        )
    if activations != "float16":
        raise ConfigError(
            f"accumulate float16 contradicts activations {activations}: products of codes are not added in "
            "float16; leave one of them out"
        )
    if values["deterministic"]:
        raise ConfigError(
            "accumulate float16 contradicts deterministic, whose kernels add in float32 in steps of every "
            "size; leave one of them out"
        )
    if values["max_num_tokens"] <= SMALL_STEPS:
        raise ConfigError(
            f"accumulate float16 is for steps of more than {SMALL_STEPS} tokens, and max_num_tokens is "
            f"{values['max_num_tokens']}; leave it out, or set max_num_tokens for more"
        )
    if sm_of(target) not in GEFORCE:
        notes.append(
            f"accumulate float16 gains nothing on {target}, whose tensor cores add in float32 at the same "
            "rate, and costs accuracy; it is for GeForce cards"
        )


def _resolve_target(values: dict[str, Any], notes: list[str]) -> None:
    """Which CPUs the engine is for, and whether tactics can be timed for them here."""
    here = native.cpu_level() if native.available() else None
    if device_of(values["target"]) != "cpu":
        for name in ("cpu_level", "timing"):
            if values[name]:
                raise ConfigError(
                    f"{name} is for CPU engines, and target is {values['target']}; leave it out"
                )
        values["cpu_level"], values["timing"] = ANY, False
        return
    if values["cpu_level"] is None:
        values["cpu_level"] = here or ANY
    level = _choice("cpu_level", values["cpu_level"], (*INCLUDES, ANY))
    can_time = here is not None and level in (here, ANY)
    if values["timing"] is None:
        values["timing"] = can_time and not values["fast_build"]
        if here is not None and not can_time:
            notes.append(
                f"tactics are not timed: times for cpu_level {level} cannot be measured on this {here} CPU; "
                "a timing cache from such a CPU is used where it is given, else the default order"
            )
    elif values["timing"] and not can_time:
        raise ConfigError(
            f"timing cannot be done for cpu_level {level} "
            + (f"on this {here} CPU" if here else "without the native library")
            + "; leave timing out (a timing cache from such a CPU may be given)"
        )


def _resolve_passes(values: dict[str, Any]) -> None:
    """Leaves what is not auto, in the passes' order."""
    wanted: dict[str, str] = values["passes"]
    known = {p.name: p for p in PASSES}
    for name, mode in wanted.items():
        _choice("pass", name, tuple(known))
        _choice(f"mode of the pass {name}", mode, typing.get_args(Mode))
    for name, p in known.items():
        if p.undoes and wanted.get(name) == wanted.get(p.undoes) == "force":
            raise ConfigError(f"passes {name} and {p.undoes} undo each other; force one of them")
    values["passes"] = {name: wanted[name] for name in known if wanted.get(name, "auto") != "auto"}


def _positive(name: str, value: int | None) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")


def _choice(name: str, value: Any, known: tuple[Any, ...]) -> Any:
    if value in known:
        return value
    near = difflib.get_close_matches(str(value), [str(k) for k in known], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"unknown {name} {value!r}{hint} (known: {', '.join(map(str, known))})")
