"""``pelton eval``: perplexity, the distance from another model, and scores on the harness's tasks."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pelton.engine.config import BuildConfig
from pelton.errors import ConfigError, MissingDependencyError
from pelton.serving.cli.options import Command, build_options, model_argument, trust_option
from pelton.serving.cli.progress import Progress, build_progress, notify
from pelton.serving.cli.tables import show, table

if TYPE_CHECKING:
    from pelton.serving.engine_cache import ResolvedModel


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  pelton eval model.gguf --quant awq-int4            beside the model as it was
  pelton eval model.engine --against model.gguf --save
  pelton eval model.engine --text prose.txt --tokens 20000 --window 1024
  pelton eval a.engine --against b.engine --json
  pelton eval model.engine --tasks arc_easy,hellaswag --limit 200

A checkpoint is built into an engine first, kept in the cache, and compared with the checkpoint itself: its
dequantised weights in float32, a float32 KV cache. The text is read in windows, each a sequence of its own,
by default of the documentation topics of Python's library (the half that nothing is calibrated on).

--tasks asks what EleutherAI's lm-evaluation-harness asks (pip install 'pelton[eval]') instead: tasks, groups,
tags, patterns, YAML files. Two engines then stand side by side with --against.""",
)
@model_argument
@click.option("--text", type=click.Path(path_type=Path), help="UTF-8 text to read.")
@click.option("--against", metavar="OTHER", help="Engine or checkpoint to compare with.")
@click.option("--tokens", type=int, metavar="N", help="Tokens to read (8192).")
@click.option("--window", type=int, metavar="N", help="Tokens of a window (256).")
@click.option(
    "--tasks", metavar="NAMES", help="Tasks of lm-evaluation-harness to score instead, with commas."
)
@click.option("--num-fewshot", type=int, metavar="N", help="Solved examples before each question of --tasks.")
@click.option("--limit", type=int, metavar="N", help="Documents of each of --tasks (all).")
@click.option("--apply-chat-template", "chat", is_flag=True, help="Ask as the model's chat template does.")
@click.option("--save", is_flag=True, help="Keep the result in the engine's report.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="Print the result only.")
@trust_option
@build_options
def eval(
    model: str,
    text: Path | None,
    against: str | None,
    tokens: int | None,
    window: int | None,
    tasks: str | None,
    num_fewshot: int | None,
    limit: int | None,
    chat: bool,
    save: bool,
    as_json: bool,
    quiet: bool,
    trust: bool,
    config: BuildConfig,
) -> None:
    """Measure MODEL on text (perplexity, KL divergence, top-1 agreement) or on tasks."""
    from pelton.serving.engine_cache import classify, download, local_path

    of_text = {"--text": text, "--tokens": tokens, "--window": window}
    of_tasks = {"--num-fewshot": num_fewshot, "--limit": limit, "--apply-chat-template": chat or None}
    if tasks is not None:
        _refuse(of_text, "is of reading text, and tasks have their own; leave it or --tasks out")
        _eval_tasks(model, tasks, num_fewshot, limit, chat, against, save, as_json, quiet, trust, config)
        return
    _refuse(of_tasks, "is of tasks; add --tasks NAMES")
    try:
        from pelton.builder.evaluate_engine import evaluate, keep
        from pelton.builder.text import read_text
    except ImportError as error:
        raise MissingDependencyError(
            f"measuring needs {error.name or 'torch'}: pip install 'pelton[build]'"
        ) from error
    given = {name: value for name, value in (("tokens", tokens), ("window", window)) if value is not None}
    content = {} if text is None else {"text": read_text(text, "text"), "name": text.name}
    with build_progress(quiet or as_json) as progress:
        resolved = _resolve(model, config, progress, quiet)
        other = against if against is not None else None if resolved.given_as_engine else model
        if save and other is None:
            raise ConfigError("only a comparison is kept in an engine's report: add --against OTHER")
        path = None
        if other is not None:
            path = download(other, notify) if classify(other) == "hub" else local_path(other)
        found = evaluate(
            resolved.engine,
            **content,  # type: ignore[arg-type]
            **given,  # type: ignore[arg-type]
            against=path,
            trust=trust,
            progress=None if progress is None else lambda done, total: progress("measure", done, total),
        )
    if save:
        keep(resolved.engine, found)
    if as_json:
        _print_json(found)
    else:
        click.echo(table(found.engine, found.rows()))


def _eval_tasks(
    model: str,
    tasks: str,
    shots: int | None,
    limit: int | None,
    chat: bool,
    against: str | None,
    save: bool,
    as_json: bool,
    quiet: bool,
    trust: bool,
    config: BuildConfig,
) -> None:
    """``--tasks``: what is wrong with them is said before anything is built."""
    from pelton.serving.engine_cache import classify, local_path

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise ConfigError("--tasks has no name; lm_eval ls tasks lists all")
    if shots is not None and shots < 0:
        raise ConfigError(f"--num-fewshot must be at least 0, not {shots}")
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit must be at least 1, not {limit}")
    classify(model)
    if against is not None and classify(against) != "engine":
        raise ConfigError(f"--tasks compares engines, and {against} is none; build it first (pelton build)")
    with _chatter(quiet or as_json):
        from pelton.serving.harness import Tasks, TaskScores, beside, keep

        asked = Tasks(names)
    with build_progress(quiet or as_json) as progress:
        engine = _resolve(model, config, progress, quiet).engine
    with _chatter(quiet or as_json):
        scores = asked.score(engine, shots=shots, limit=limit, chat=chat, trust=trust)
        if against is not None:
            other = asked.score(local_path(against), shots=shots, limit=limit, chat=chat, trust=trust)
            scores = beside(scores, other)
    found = TaskScores(
        engine=engine.name,
        harness=asked.harness,
        limit=limit,
        against="" if against is None else local_path(against).name,
        scores=scores,
    )
    if save:
        keep(engine, found)
    if as_json:
        _print_json(found)
    else:
        show(found.title(), found.rows(), header=found.header())


@contextlib.contextmanager
def _chatter(quiet: bool) -> Iterator[None]:
    """What the harness prints goes to standard error, or nowhere."""
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(open(os.devnull, "w", encoding="utf-8")) if quiet else sys.stderr
        stack.enter_context(contextlib.redirect_stdout(stream))
        stack.enter_context(contextlib.redirect_stderr(stream))
        yield


def _resolve(model: str, config: BuildConfig, progress: Progress | None, quiet: bool) -> ResolvedModel:
    from pelton.serving.engine_cache import resolve_model

    resolved = resolve_model(model, config, progress=progress, notify=None if quiet else notify)
    if resolved.given_as_engine and config != BuildConfig():
        raise ConfigError(f"{model} is an engine: it is measured as it was built; leave the settings out")
    return resolved


def _refuse(flags: Mapping[str, object], why: str) -> None:
    for flag, value in flags.items():
        if value is not None:
            raise ConfigError(f"{flag} {why}")


def _print_json(found: object) -> None:
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
