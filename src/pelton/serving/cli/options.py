"""Flags that several commands share. Every field of ``BuildConfig`` and ``SamplingParams`` is one.

The flags are made from the structs themselves, so that a new field is a flag at once; the tables
below hold what a struct cannot: help, and the form of values that are not one word.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from pelton.engine.config import BuildConfig
from pelton.engine.shapes import OptimizationProfile
from pelton.runtime.request import SamplingParams

if TYPE_CHECKING:
    from pelton.serving.llm import LLM

F = TypeVar("F", bound=Callable[..., Any])

BUILD_HELP = {
    "max_batch_size": "Sequences in one step. On an engine: may be lowered.",
    "max_seq_len": "Prompt and answer together, in tokens. On an engine: may be lowered.",
    "max_num_tokens": "Tokens in one step, all sequences together. On an engine: may be lowered.",
    "max_input_len": "Longest prompt, in tokens. On an engine: may be lowered.",
    "block_size": "Tokens in a KV block.",
    "dtype": "Type of unquantised weights: float32, bfloat16, float16.",
    "quant": "Quantise the weights first: a recipe of pelton quantize --list.",
    "activations": "Input precision of quantised products: float32, int8; on GPUs dtype, int8, fp8.",
    "kv_dtype": "Type of cached keys and values: float32, float16, bfloat16, int8, fp8.",
    "deterministic": "GPU: answers that do not depend on the batch, bit for bit; slower.",
    "accumulate": "GPU: large steps' sums in float32 or float16 (for GeForce cards and dtype float16).",
    "gpu_memory_fraction": "Share of a GPU's free memory to take. On an engine: any.",
    "threads": "CPU threads; 0: all cores. On an engine: any number.",
    "fast_build": "Build in the shortest time: fewest passes, nothing timed, a shorter check.",
    "profiles": "A kind of step to be fast at, such as T=1:1:8,B=1:1:8: min:opt:max of tokens T, sequences "
    "B, logits rows N (repeatable).",
    "opt_num_tokens": "Tokens that a step most often has.",
    "timing": "Time tactics on this machine, or take them in their default order.",
    "plugins": "Tactic of an op: auto, a tactic's name or disable (repeatable; docs/tactics.md lists them).",
    "target": "Device to build for: cpu, cuda (this machine's GPU), sm_90, sm_80, ...",
    "cpu_level": "CPU to build for: generic, avx2, avxvnni, avx512, avx512bf16, any. Default: this one.",
    "model_impl": "Model definition: pelton, transformers (any causal model), auto.",
    "profiling": "What the engine keeps for profilers and debuggers: none, names, detailed.",
    "passes": "A compiler pass: auto, force or off (repeatable; docs/passes.md lists them).",
}

SAMPLING_HELP = {
    "n": "Answers to the prompt.",
    "temperature": "Randomness; 0 always takes the likeliest token.",
    "top_k": "Sample among the K likeliest tokens; 0: all.",
    "top_p": "Sample among the likeliest tokens that hold this probability together.",
    "min_p": "Drop tokens less likely than this fraction of the likeliest one.",
    "repetition_penalty": "Divide logits of tokens already in prompt or answer; 1: off.",
    "presence_penalty": "Subtract from logits of tokens already in the answer.",
    "frequency_penalty": "The same, times how often they occurred.",
    "seed": "Same seed, same answer.",
    "max_tokens": "Longest answer, in tokens. Default: what fits.",
    "min_tokens": "Shortest answer, in tokens.",
    "stop": "Text that ends the answer (repeatable).",
    "stop_token_ids": "Token id that ends the answer (repeatable).",
    "ignore_eos": "Go on after the model's end token.",
    "logit_bias": "ID:BIAS added to a token's logit (repeatable).",
    "bad_words": "Text that must not occur (repeatable).",
    "allowed_token_ids": "Only these token ids may occur (repeatable).",
    "logprobs": "Report this many alternatives per token (with --json).",
    "prompt_logprobs": "The same for the prompt's tokens (with --json).",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "include_stop_str_in_output": "Keep the stop text at the end of the answer.",
}


class _Bias(click.ParamType[tuple[int, float]]):
    name = "id:bias"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        token, _, bias = str(value).partition(":")
        try:
            return int(token), float(bias)
        except ValueError:
            self.fail(f"{value!r} is not TOKEN_ID:BIAS, such as 50256:-100", param, ctx)


class _Setting(click.ParamType[tuple[str, str]]):
    name = "name=value"

    def __init__(self, form: str) -> None:
        self._form = form

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        name, equals, setting = str(value).partition("=")
        if not (name and equals and setting):
            self.fail(f"{value!r} is not {self._form}", param, ctx)
        return name, setting


def setting_type(form: str = "NAME=VALUE, such as fuse_qkv=off") -> click.ParamType[tuple[str, str]]:
    """NAME=VALUE as a pair; ``form``: what it is called where a value is none."""
    return _Setting(form)


class _Profile(click.ParamType[OptimizationProfile]):
    name = "profile"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if isinstance(value, OptimizationProfile) else OptimizationProfile.parse(value)


#: Flags of fields that hold one setting per name: one setting, in the singular.
SINGULAR = {"passes": "pass", "plugins": "plugin", "profiles": "profile"}


class SectionOption(click.Option):
    """A flag that ``--help`` lists under a heading of its own."""

    section = ""


class SamplingOption(SectionOption):
    """A field of ``SamplingParams``."""

    section = "Sampling"


class EngineOption(SectionOption):
    """A field of ``BuildConfig``."""

    section = "Engine"


class Command(click.Command):
    """A command whose options are listed in sections, its own first."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click's, by section."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": [], "Sampling": [], "Engine": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if isinstance(param, click.Option) and record is not None:
                sections[getattr(param, "section", "Options")].append(record)
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


def flag_of(field: msgspec.structs.FieldInfo) -> str:
    """The flag's name, without dashes before it."""
    return SINGULAR.get(field.name, field.encode_name).replace("_", "-")


def _flags(
    struct: type[msgspec.Struct],
    kind_of_option: type[click.Option],
    help_texts: dict[str, str],
    skip: tuple[str, ...] = (),
) -> list[click.Option]:
    """One option per field of ``struct``; a value of None or () means that it was not given."""
    hints = typing.get_type_hints(struct)
    options = []
    for field in msgspec.structs.fields(struct):
        if field.name in skip:
            continue
        flag = "--" + flag_of(field)
        kind = _given(hints[field.name])
        attrs: dict[str, Any] = {"help": help_texts.get(field.name, ""), "default": None}
        if kind is bool:
            options.append(kind_of_option([f"{flag}/--no-{flag[2:]}", field.name], **attrs))
            continue
        if typing.get_origin(kind) is tuple:
            item = typing.get_args(kind)[0]
            attrs |= {"type": item, "multiple": True}
            if item is OptimizationProfile:
                attrs |= {"type": _Profile(), "metavar": "DIM=MIN:OPT:MAX,..."}
        elif typing.get_origin(kind) is dict:
            settings = typing.get_args(kind)[0] is str
            attrs |= {"type": setting_type() if settings else _Bias(), "multiple": True}
            attrs["metavar"] = "NAME=VALUE" if settings else "ID:BIAS"
        else:
            # Ranges are checked by the one validation that every front end shares.
            attrs |= {"type": kind, "metavar": {int: "N", float: "X", str: "NAME"}[kind]}
        options.append(kind_of_option([flag, field.name], **attrs))
    return options


def _collect(struct: type[msgspec.Struct], names: list[str], kwargs: dict[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    hints = typing.get_type_hints(struct)
    for name in names:
        value = kwargs.pop(name)
        if value is None or value == ():
            continue
        given[name] = _once(name, value) if typing.get_origin(_given(hints[name])) is dict else value
    return given


def _once(name: str, settings: tuple[tuple[Any, Any], ...]) -> dict[Any, Any]:
    """The settings by name; one that is given twice must agree with itself."""
    found: dict[Any, Any] = {}
    for key, value in settings:
        if found.setdefault(key, value) != value:
            flag = SINGULAR.get(name, name.replace("_", "-"))
            raise click.UsageError(f"--{flag} sets {key} to {found[key]} and to {value}; give it once")
    return found


def _given(kind: Any) -> Any:
    """The type of a field's value when it is given: None is the absent flag."""
    if isinstance(kind, types.UnionType):
        return next(k for k in typing.get_args(kind) if k is not type(None))
    return kind


def _with_flags(function: F, options: list[click.Option], argument: str, collect: Callable[..., Any]) -> F:
    names = [option.name for option in options]

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{argument: collect(names, kwargs)}, **kwargs)

    params = getattr(function, "__click_params__", [])
    # click keeps decorators' options bottom-up.
    wrapper.__click_params__ = [*params, *reversed(options)]  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]


def build_options(function: F) -> F:
    """Add a flag per ``BuildConfig`` field; the command receives ``config: BuildConfig``."""
    options = _flags(BuildConfig, EngineOption, BUILD_HELP)
    return _with_flags(
        function, options, "config", lambda names, kw: BuildConfig(**_collect(BuildConfig, names, kw))
    )


def sampling_options(*skip: str) -> Callable[[F], F]:
    """Add a flag per ``SamplingParams`` field but ``skip``; the command receives ``sampling``, a dict
    of the fields that were given (the model's own defaults fill the others)."""

    def decorate(function: F) -> F:
        options = _flags(SamplingParams, SamplingOption, SAMPLING_HELP, skip)
        return _with_flags(
            function, options, "sampling", lambda names, kw: _collect(SamplingParams, names, kw)
        )

    return decorate


def sampling_params(llm: LLM, given: dict[str, Any]) -> SamplingParams:
    """``given`` over what the model recommends. Where neither says how to sample, a little more careful
    than the API's temperature of 1, at which small models ramble."""
    careful = {"temperature": 0.7, "top_p": 0.9}
    chosen = given.keys() | llm.config.model.generation.keys()
    if chosen & {"temperature", "top_k", "top_p", "min_p"}:
        careful = {}
    return llm.sampling_params(**careful, **given)


def trust_option(function: F) -> F:
    """``--trust``; the command receives ``trust``."""
    option = click.option(
        "--trust", is_flag=True, help="Run code that an engine carries although it was not built here."
    )
    return option(function)


def model_argument(function: F) -> F:
    """The MODEL argument: engine directory, checkpoint folder, GGUF file or hub id."""
    return click.argument("model", metavar="MODEL")(function)
