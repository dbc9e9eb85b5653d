"""``pelton bench``: what a model does on this machine."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from pelton.engine.config import BuildConfig
from pelton.serving.cli.config_flags import config_flags
from pelton.serving.cli.options import Command, build_options, model_argument, trust_option
from pelton.serving.cli.progress import notify, open_llm

if TYPE_CHECKING:
    from pelton.serving.llm import LLM

PREFILL_TOKENS = 256


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  pelton bench model.engine
  pelton bench model.engine --threads 2 --rounds 5 --json

Prompts are random token ids and answers greedy, without end token; medians over --rounds. Times
include scheduling, sampling and detokenising. host step is the host's part of a step, median and
99th percentile: scheduling, packing, sampling where the host does it. start is a whole new process:
pelton run, one token.""",
)
@model_argument
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1, 100), help="Repetitions.")
@click.option(
    "--tokens", default=64, show_default=True, type=click.IntRange(2), help="Tokens to decode per sequence."
)
@click.option("--no-start", is_flag=True, help="Leave out the start-up test.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@trust_option
@build_options
def bench(
    model: str,
    rounds: int,
    tokens: int,
    no_start: bool,
    as_json: bool,
    trust: bool,
    config: BuildConfig,
) -> None:
    """Measure MODEL: decode at batch 1 and 8, prefill of 256 tokens, start of a process."""
    results: dict[str, Any] = {}
    with open_llm(model, config, trust) as llm:
        limits = llm.config.build
        assert limits.max_batch_size is not None
        results["model"] = llm.model_id
        results["threads"] = config.threads or limits.threads or "all cores"
        for batch in (1, 8):
            if batch > limits.max_batch_size:
                notify(f"decode at batch {batch} is left out: the engine's max_batch_size is less.")
                continue
            step = statistics.median(_decode_step(llm, batch, tokens, i) for i in range(rounds))
            results[f"decode_batch_{batch}"] = {
                "ms_per_step": step * 1e3,
                "tokens_per_second": batch / step,
            }
        if (limits.max_input_len or 0) >= PREFILL_TOKENS:
            seconds = statistics.median(_prefill(llm, i) for i in range(rounds))
            results[f"prefill_{PREFILL_TOKENS}"] = {
                "ms": seconds * 1e3,
                "tokens_per_second": PREFILL_TOKENS / seconds,
            }
        else:
            notify(f"prefill is left out: the engine's max_input_len is below {PREFILL_TOKENS}.")
        if (host := llm.stats().host_time) is not None:
            results["host_step"] = {"ms": host.median * 1e3, "p99_ms": host.p99 * 1e3}
    if not no_start:
        results["start"] = {
            "ms": 1e3 * statistics.median(_start(model, config, trust) for _ in range(rounds))
        }
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(results)).decode())
    else:
        _print(results)


def _prompt(llm: LLM, length: int, seed: int) -> tuple[int, ...]:
    """Random token ids; another ``seed`` shares no prefix, so the prefix cache does not help."""
    import random

    return tuple(random.Random(seed).choices(range(llm.config.model.vocab_size), k=length))


def _decode_step(llm: LLM, batch: int, tokens: int, round_: int) -> float:
    """Median seconds between steps while ``batch`` sequences decode."""
    params = llm.sampling_params(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompts = [_prompt(llm, 16, 1000 * round_ + i) for i in range(batch)]
    generation = llm._front.prepare(prompts, [params] * batch)
    times: list[float] = []
    counts = [0] * batch
    for chunk in llm._chunks(generation):
        counts[chunk.prompt_index] += len(chunk.token_ids)
        if min(counts) > len(times):  # every sequence has this many tokens now
            times.append(time.perf_counter())
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def _prefill(llm: LLM, round_: int) -> float:
    """Seconds from prompt to first token."""
    params = llm.sampling_params(temperature=0.0, max_tokens=1, ignore_eos=True)
    prompt = _prompt(llm, PREFILL_TOKENS, 77_000 + round_)
    start = time.perf_counter()
    llm.generate(prompt, params)
    return time.perf_counter() - start


def _start(model: str, config: BuildConfig, trust: bool) -> float:
    """Seconds that ``pelton run MODEL Hi --max-tokens 1`` takes from start to exit."""
    command = [sys.executable, "-m", "pelton", "run", model, "Hi", "--max-tokens", "1"]
    command += config_flags(config)
    command += ["--trust"] if trust else []
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def _print(results: dict[str, Any]) -> None:
    from pelton.serving.cli.tables import table

    rows = []
    for name, values in results.items():
        if not isinstance(values, dict):
            continue
        milliseconds = values.get("ms", values.get("ms_per_step"))
        unit = "ms/step" if "ms_per_step" in values else "ms"
        rate = f"{values['tokens_per_second']:.1f} tokens/s" if "tokens_per_second" in values else ""
        if "p99_ms" in values:
            rate = f"99 % below {values['p99_ms']:.2f} ms"
        rows.append((name.replace("_", " "), f"{milliseconds:.2f} {unit}", rate))
    click.echo(table(f"{results['model']}, threads: {results['threads']}", rows))
