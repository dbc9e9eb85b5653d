"""``pelton timing-cache``: look into files of measured times, and put them together."""

from __future__ import annotations

from pathlib import Path

import click

from pelton.errors import ConfigError, PeltonError
from pelton.serving.cli.tables import table


@click.group(
    name="timing-cache",
    epilog="""\b
Examples:
  pelton build model.gguf --timing-cache times.json      measures what the file lacks, and adds it
  pelton timing-cache show times.json
  pelton timing-cache merge times.json other.json -o all.json

Times hold for one CPU model, number of cores, native library and Pelton version; a build refuses a file
from elsewhere.""",
)
def timing_cache() -> None:
    """Show or merge files of measured tactic times (pelton build --timing-cache)."""


@timing_cache.command()
@click.argument("file", type=click.Path(path_type=Path))
def show(file: Path) -> None:
    """Where FILE was measured, whether it holds here, and its times."""
    from pelton.builder.timing_cache import difference, read_timing_cache, this_machine

    cache = read_timing_cache(_existing(file))
    on = cache.timed_on
    try:
        why = difference(on, this_machine())
    except PeltonError as error:
        why = str(error)
    rows = [
        ("CPU", f"{on.cpu}, {on.cpu_level}, {on.cores} cores"),
        ("native library", f"{on.library}, ABI {on.native_abi}"),
        ("Pelton", on.pelton),
        ("holds here", f"no: {why}" if why else "yes"),
        ("calls", len(cache.entries)),
    ]
    click.echo(table("timing cache", rows))
    for key in sorted(cache.entries):
        click.echo(f"\n{key}")
        entry = cache.entries[key]
        for name, us in sorted(entry.items(), key=lambda item: (item[1] is None, item[1] or 0.0)):
            click.echo(f"  {'wrong' if us is None else f'{us:.2f} us':>14}  {name}")


@timing_cache.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="File to write.")
def merge(files: tuple[Path, ...], output: Path) -> None:
    """Put the times of FILES into one file; where several have a call, the first one's times stay."""
    from pelton.builder import timing_cache as caches

    merged = caches.read_timing_cache(_existing(files[0]))
    for file in files[1:]:
        try:
            merged = caches.merge(merged, caches.read_timing_cache(_existing(file)))
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from error
    caches.write_timing_cache(output, merged)
    click.echo(f"{output}: {len(merged.entries)} calls")


def _existing(file: Path) -> Path:
    if file.is_dir():
        raise ConfigError(f"{file} is a folder; that of an engine is {file / 'timing_cache.json'}")
    if not file.is_file():
        raise ConfigError(f"there is no timing cache {file}")
    return file
