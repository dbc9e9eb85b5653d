"""``pelton refit`` and ``pelton strip``: weights into an engine, and out of it."""

from __future__ import annotations

from pathlib import Path

import click

from pelton.errors import ConfigError
from pelton.serving.cli.options import Command
from pelton.serving.cli.progress import build_progress, notify


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  pelton refit model.engine ./my-finetune
  pelton refit model.engine ./my-finetune --names "*.mlp.*" -o mine.engine
  pelton strip model.engine -o small.engine && pelton refit small.engine ./model

The plan, the kernels and the tokenizer stay; the checkpoint must be of the same model, its tensors of the
same types. The engine is replaced in one step at the end. For a running server see pelton serve
--enable-refit.""",
)
@click.argument("engine", type=click.Path(path_type=Path))
@click.argument("checkpoint")
@click.option(
    "--names",
    multiple=True,
    metavar="PATTERN",
    help="Only weights with such a name, the engine's or the checkpoint's (repeatable); keep the others.",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Leave ENGINE as it is and write this one."
)
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
def refit(engine: Path, checkpoint: str, names: tuple[str, ...], output: Path | None, quiet: bool) -> None:
    """Put the weights of CHECKPOINT (a Hugging Face folder, GGUF file or hub id) into ENGINE."""
    from pelton.builder.refit import refit as run
    from pelton.serving.engine_cache import classify, download, local_path

    kind = classify(checkpoint)
    if kind == "engine":
        raise ConfigError(f"{checkpoint} is an engine; refit takes the checkpoint that it was built from")
    folder = download(checkpoint, notify) if kind == "hub" else local_path(checkpoint)
    with build_progress(quiet) as progress:
        report = run(engine, folder, names=names, output=output, progress=progress)
    if not quiet:
        click.echo(report.text())


@click.command(
    cls=Command,
    epilog="""\b
Example:
  pelton strip model.engine -o small.engine

What is left is the plan, the tokenizer and the constants. It cannot run until pelton refit fills it.""",
)
@click.argument("engine", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="Engine directory to make."
)
def strip(engine: Path, output: Path) -> None:
    """Write ENGINE without its weights to OUTPUT."""
    from pelton.builder.strip import strip as run
    from pelton.engine.resources import human_bytes

    if output.exists():
        raise ConfigError(f"{output} exists already; choose another -o.")
    click.echo(f"  {output.name}  {human_bytes(run(engine, output))} without weights")
