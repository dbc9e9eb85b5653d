"""``pelton build``: a checkpoint into an engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pelton.engine.config import BuildConfig
from pelton.errors import ConfigError, MissingDependencyError
from pelton.serving.cli.explain import explain_choices, explain_pass
from pelton.serving.cli.options import Command, build_options
from pelton.serving.cli.progress import build_progress, notify

if TYPE_CHECKING:
    from pelton.builder.gate import QualityGate


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  pelton build ./SmolLM2-135M-Instruct -o smollm2.engine
  pelton build model.gguf -o model.engine --max-batch-size 16 --max-seq-len 4096
  pelton build model.gguf --timing-cache times.json --profile T=1:1:8 --profile T=9:256:512
  pelton build model.gguf -o model.engine --max-kl 0.01 --max-ppl-increase 0.02 --eval-text prose.txt
  pelton build model.gguf -o model.engine --explain
  pelton inspect model.engine

--max-kl and --max-ppl-increase hold the engine to the unquantised model (float32, exact activations) on
text: by default the documentation topics of Python's library. Beyond them nothing is written.

A setting that is left out is chosen for the model and this machine; every choice is printed. The
engine is written next to its place and renamed at the end, so it is never half there.""",
)
@click.argument("checkpoint")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Engine directory to make. Default: the checkpoint's name with .engine, here.",
)
@click.option("--force", is_flag=True, help="Replace OUTPUT when it is there.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Only tell what would be built, its memory and time: no weights are read (a hub id is downloaded).",
)
@click.option(
    "--timing-cache",
    type=click.Path(path_type=Path),
    help="File of tactic times to use, and to add what is measured to.",
)
@click.option("--explain", is_flag=True, help="Show what each pass changes, and why tactics were chosen.")
@click.option("--max-kl", type=float, metavar="X", help="Largest KL divergence on text, nats per token.")
@click.option(
    "--max-ppl-increase", type=float, metavar="X", help="Largest increase of perplexity; 0.02 is 2 %."
)
@click.option("--eval-text", type=click.Path(path_type=Path), help="Text to measure quality on.")
@click.option("--eval-tokens", type=int, metavar="N", help="Tokens of it to read (1024).")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@build_options
def build(
    checkpoint: str,
    output: Path | None,
    force: bool,
    timing_cache: Path | None,
    dry_run: bool,
    explain: bool,
    max_kl: float | None,
    max_ppl_increase: float | None,
    eval_text: Path | None,
    eval_tokens: int | None,
    quiet: bool,
    config: BuildConfig,
) -> None:
    """Compile CHECKPOINT (a Hugging Face folder, GGUF file or hub id) into an engine."""
    from pelton.serving.engine_cache import build_engine, classify, download, local_path

    kind = classify(checkpoint)
    if kind == "engine":
        raise ConfigError(f"{checkpoint} is an engine already; run it with: pelton run {checkpoint}")
    name = Path(checkpoint).resolve().name if kind != "hub" else checkpoint.rpartition("/")[2]
    target = output or Path(name.removesuffix(".gguf") + ".engine")
    if target.exists():
        if not force and not dry_run:
            raise ConfigError(f"{target} exists already; choose another -o, or replace it with --force.")
        if not (target / "manifest.json").is_file():
            raise ConfigError(f"{target} exists and is not an engine, so --force does not replace it.")
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder {target.absolute().parent} to put {target.name} in.")
    folder = download(checkpoint, notify) if kind == "hub" else local_path(checkpoint)
    gate = _gate(max_kl, max_ppl_increase, eval_text, eval_tokens)
    # Bars would be drawn over what is explained.
    with build_progress(quiet or explain) as progress:
        report = build_engine(
            folder,
            config,
            target,
            progress=progress,
            notify=None if quiet else _note,
            dry_run=dry_run,
            timing_cache=timing_cache,
            explain=explain_pass if explain else None,
            gate=gate,
        )
    if explain:
        explain_choices(report)
    if not quiet:
        click.echo(report.text())


def _gate(
    max_kl: float | None, max_ppl_increase: float | None, text: Path | None, tokens: int | None
) -> QualityGate | None:
    if max_kl is None and max_ppl_increase is None and text is None and tokens is None:
        return None
    try:
        from pelton.builder.gate import read_gate
    except ImportError as error:
        raise MissingDependencyError(
            f"building needs {error.name or 'torch'}: pip install 'pelton[build]'"
        ) from error
    return read_gate(max_kl, max_ppl_increase, text, tokens)


def _note(sentence: str) -> None:
    """The memory budget and automatic choices, before anything is allocated."""
    print("  " + sentence.replace("\n", "\n  "), file=sys.stderr, flush=True)
