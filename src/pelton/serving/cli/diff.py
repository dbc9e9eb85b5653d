"""``pelton diff``: what tells two engines apart."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pelton.serving.cli.options import Command
from pelton.serving.cli.tables import show

if TYPE_CHECKING:
    from pelton.engine.difference import Change


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  pelton diff model.engine model-float32.engine
  pelton diff old.engine new.engine --exit-code    1 when they differ, for scripts
  pelton diff old.engine new.engine --json

Instructions are matched by the names of the tensors they make; layers that change alike stand once.
Engines of different models are refused.""",
)
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--exit-code", is_flag=True, help="Exit with 1 when they differ.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def diff(a: Path, b: Path, exit_code: bool, as_json: bool) -> None:
    """Show what changes from engine A to engine B: settings, plan, tactics, weights, memory, quality."""
    from pelton.engine.artifact import open_engine
    from pelton.engine.difference import difference

    found = difference(open_engine(a), open_engine(b))
    if as_json:
        import msgspec

        record = {"equal": found.equal, **msgspec.to_builtins(found)}
        click.echo(msgspec.json.format(msgspec.json.encode(record)).decode())
    elif found.equal:
        click.echo(f"{a.name} and {b.name} are the same.")
    else:
        for name in found.__struct_fields__:
            _section(name, getattr(found, name), (a.name, b.name))
    if exit_code and not found.equal:
        raise click.exceptions.Exit(1)


def _section(name: str, changes: tuple[Change, ...], engines: tuple[str, str]) -> None:
    if not changes:
        return
    rows = [
        (f"{c.what}{f' x{c.count}' if c.count > 1 else ''}", c.before or "-", c.after or "-") for c in changes
    ]
    show(name, rows, header=("", *engines))
    click.echo()
