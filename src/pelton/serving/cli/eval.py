"""``pelton eval``: perplexity, and the distance from another model."""

from __future__ import annotations

from pathlib import Path

import click

from pelton.engine.config import BuildConfig
from pelton.errors import ConfigError, MissingDependencyError
from pelton.serving.cli.options import Command, build_options, model_argument, trust_option
from pelton.serving.cli.progress import build_progress, notify
from pelton.serving.cli.tables import table


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  pelton eval model.gguf --quant awq-int4            beside the model as it was
  pelton eval model.engine --against model.gguf --save
  pelton eval model.engine --text prose.txt --tokens 20000 --window 1024
  pelton eval a.engine --against b.engine --json

A checkpoint is built into an engine first, kept in the cache, and compared with the checkpoint itself: its
dequantised weights in float32, a float32 KV cache. The text is read in windows, each a sequence of its own,
by default of the documentation topics of Python's library (the half that nothing is calibrated on).""",
)
@model_argument
@click.option("--text", type=click.Path(path_type=Path), help="UTF-8 text to read.")
@click.option("--against", metavar="OTHER", help="Engine or checkpoint to compare with.")
@click.option("--tokens", type=int, metavar="N", help="Tokens to read (8192).")
@click.option("--window", type=int, metavar="N", help="Tokens of a window (256).")
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
    save: bool,
    as_json: bool,
    quiet: bool,
    trust: bool,
    config: BuildConfig,
) -> None:
    """Measure MODEL on text: perplexity, KL divergence and top-1 agreement."""
    from pelton.serving.engine_cache import classify, download, local_path, resolve_model

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
        resolved = resolve_model(model, config, progress=progress, notify=None if quiet else notify)
        if resolved.given_as_engine and config != BuildConfig():
            raise ConfigError(f"{model} is an engine: it is measured as it was built; leave the settings out")
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
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        click.echo(table(found.engine, found.rows()))
