"""``pelton build``: a checkpoint into an engine."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from pelton.engine.config import BuildConfig
from pelton.errors import ConfigError
from pelton.serving.cli.options import Command, build_options
from pelton.serving.cli.progress import build_progress, notify


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  pelton build ./SmolLM2-135M-Instruct -o smollm2.engine
  pelton build model.gguf -o model.engine --max-batch-size 16 --max-seq-len 4096
  pelton build model.gguf --timing-cache times.json --profile T=1:1:8 --profile T=9:256:512
  pelton inspect model.engine

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
    "--dry-run", is_flag=True, help="Only tell what would be built, its memory and time: no weights are read."
)
@click.option(
    "--timing-cache",
    type=click.Path(path_type=Path),
    help="File of tactic times to use, and to add what is measured to.",
)
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@build_options
def build(
    checkpoint: str,
    output: Path | None,
    force: bool,
    timing_cache: Path | None,
    dry_run: bool,
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
    with build_progress(quiet) as progress:
        report = build_engine(
            folder,
            config,
            target,
            progress=progress,
            notify=None if quiet else _note,
            dry_run=dry_run,
            timing_cache=timing_cache,
        )
    if not quiet:
        click.echo(report.text())


def _note(sentence: str) -> None:
    """The memory budget and automatic choices, before anything is allocated."""
    print("  " + sentence.replace("\n", "\n  "), file=sys.stderr, flush=True)
