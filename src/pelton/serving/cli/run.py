"""``pelton run``: one prompt, one answer on standard output."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from pelton.engine.config import BuildConfig
from pelton.errors import RequestError

if TYPE_CHECKING:
    from pelton.engine.memory_monitor import MemoryUse

from pelton.serving.cli.options import (
    Command,
    build_options,
    model_argument,
    sampling_options,
    sampling_params,
    trust_option,
)
from pelton.serving.cli.progress import open_llm


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  pelton run model.engine "Why is the sky blue?"
  pelton run model.gguf "Name three rivers." --max-tokens 40 --temperature 0
  cat report.txt | pelton run model.engine - --system "Summarise in one sentence."
  pelton run model.engine "Once upon a time" --raw --n 3 --seed 1
  pelton run model.engine "Hello" --json | jq -r '.outputs[0].text'

\b
The answer goes to standard output as it is made, everything else to standard error. A model that has
a chat template gets the prompt as a user's message; --raw continues the prompt as plain text instead.
Sampling flags that are left out take the model's own recommended values; where it has none and no
flag says how to sample, temperature 0.7 and top-p 0.9.""",
)
@model_argument
@click.argument("prompt", required=False)
@click.option("--system", help="System message before the prompt (needs a chat template).")
@click.option("--raw", is_flag=True, help="Continue PROMPT as plain text, without the chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of streaming text.")
@click.option("--stats", is_flag=True, help="Print token counts and times to standard error at the end.")
@trust_option
@sampling_options()
@build_options
def run(
    model: str,
    prompt: str | None,
    system: str | None,
    raw: bool,
    as_json: bool,
    stats: bool,
    trust: bool,
    sampling: dict[str, Any],
    config: BuildConfig,
) -> None:
    """Answer PROMPT with MODEL and exit; PROMPT - or none reads standard input."""
    if prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        prompt = sys.stdin.read().removesuffix("\n")
    if prompt is None:
        raise click.UsageError('give a prompt: pelton run MODEL "..."', click.get_current_context())
    # Bytes of an argument or of standard input that are not UTF-8 came as lone surrogates, which no
    # tokenizer and no JSON can hold.
    prompt = prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if not prompt:
        raise RequestError("the prompt is empty.", param="prompt")
    for name in ("logprobs", "prompt_logprobs"):
        if name in sampling and not as_json:
            flag = "--" + name.replace("_", "-")
            raise click.UsageError(
                f"{flag} is reported in JSON only; add --json", click.get_current_context()
            )
    if stats and as_json:
        raise click.UsageError(
            "--stats measures the stream that --json leaves out; leave one of them out",
            click.get_current_context(),
        )
    if raw and system is not None:
        raise click.UsageError(
            "--system needs the chat template that --raw leaves out", click.get_current_context()
        )
    with open_llm(model, config, trust) as llm:
        chat = not raw and llm.tokenizer.chat_template is not None
        if system is not None and not chat:
            raise RequestError(
                f"{model} has no chat template, so --system has no place to go; put it in PROMPT."
            )
        params = sampling_params(llm, sampling)
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": prompt})
        if as_json:
            out = (llm.chat(messages, params) if chat else llm.generate(prompt, params))[0]
            _print_json(llm.model_id, out)
            return
        chunks = llm.stream_chat(messages, params) if chat else llm.stream(prompt, params)
        _print_stream(chunks, params.n, stats)
        if stats:
            _print_memory(llm.stats().memory)


def _print_stream(chunks: Any, n: int, stats: bool) -> None:
    """Answer 0 as it comes, the others when it is complete."""
    import time

    start = time.perf_counter()
    first = last = 0.0
    tokens = 0
    others = [""] * n
    final = None
    for chunk in chunks:
        if chunk.token_ids:
            last = time.perf_counter()
            first = first or last
            tokens += len(chunk.token_ids)
        if chunk.index == 0:
            sys.stdout.write(chunk.delta)
            sys.stdout.flush()
        else:
            others[chunk.index] += chunk.delta
        final = chunk
    sys.stdout.write("\n")
    for i in range(1, n):
        sys.stdout.write(f"\n--- answer {i + 1}\n{others[i]}\n")
    sys.stdout.flush()
    if stats and final is not None:
        rate = f", {(tokens - 1) / (last - first):.1f} tokens/s after it" if last > first else ""
        print(
            f"pelton: {len(final.output.prompt_token_ids)} prompt tokens, {tokens} generated; "
            f"first token after {(first - start) * 1e3:.0f} ms{rate}",
            file=sys.stderr,
        )


def _print_memory(use: MemoryUse | None) -> None:
    """The engine's memory plan beside what was used."""
    if use is None:
        return
    from pelton.engine.resources import human_bytes as text

    work = use.arena + use.workspace + use.inputs
    print(
        f"pelton: memory planned: weights {text(use.weights)}, KV up to {text(use.kv)}, "
        f"work {text(work)}, overhead {text(use.overhead)}; used: {text(use.growth)} "
        f"besides weights, {text(use.peak_resident)} at most with weights and Python",
        file=sys.stderr,
    )


def _print_json(model_id: str, out: Any) -> None:
    import msgspec

    record = {"model": model_id} | msgspec.to_builtins(out)
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(record)).decode() + "\n")
