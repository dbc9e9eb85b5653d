"""``pelton quantize --sweep``: recipes side by side, as a table, JSON and a plot."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pelton.errors import ConfigError
from pelton.serving.cli.tables import show

if TYPE_CHECKING:
    from pelton.builder.sweep import SweepRow
    from pelton.models.checkpoint import Checkpoint
    from pelton.quant.config import QuantConfig

#: Swept where no recipes are named: one of each kind, and rounding to nearest beside what is calibrated.
USUAL = ("int8", "int4", "gptq-int4", "int4-asymmetric", "awq-int4", "nf4", "fp8", "w8a8", "smoothquant")


def run_sweep(
    checkpoint: Checkpoint, configs: list[QuantConfig], output: Path, *, speed: bool, quiet: bool
) -> None:
    """Print a row as each recipe is done; write ``sweep.json`` and ``sweep.svg`` into ``output``."""
    import msgspec

    from pelton.builder.sweep import sweep

    if output.exists() and not output.is_dir():
        raise ConfigError(f"{output} is a file; give a folder for the table and the plot")

    def note(text: str) -> None:
        if not quiet:
            print(f"  {text}", file=sys.stderr, flush=True)

    rows: list[SweepRow] = []
    for row in sweep(checkpoint, configs, speed=speed, note=note):
        rows.append(row)
        output.mkdir(parents=True, exist_ok=True)
        # What is measured is kept, should a later recipe fail.
        (output / "sweep.json").write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1))
        (output / "sweep.svg").write_text(_plot(rows))
    show("", [_cells(row, speed) for row in rows], header=_header(speed))
    click.echo(f"  unquantised: perplexity {rows[0].perplexity_unquantised:.3f} over {rows[0].tokens} tokens")
    click.echo(f"  {output}/sweep.json  {output}/sweep.svg")


def _header(speed: bool) -> tuple[str, ...]:
    columns = ("recipe", "bits", "MB", "perplexity", "", "KL", "same top token")
    return (*columns, "decode ms") if speed else columns


def _cells(row: SweepRow, speed: bool) -> tuple[Any, ...]:
    cells = (
        row.recipe,
        f"{row.bits:.2f}",
        f"{row.nbytes / 1e6:.1f}",
        f"{row.perplexity:.3f}",
        f"{row.perplexity / row.perplexity_unquantised - 1:+.1%}",
        f"{row.kl:.4f}",
        f"{row.top1:.1%}",
    )
    return (*cells, f"{row.decode_ms:.2f}") if speed else cells


def _plot(rows: list[SweepRow]) -> str:
    from pelton.serving.page.scatter import scatter

    points = [(row.bits, row.perplexity, row.recipe, row.what.split()[0]) for row in rows]
    exact = rows[0].perplexity_unquantised
    return scatter(points, x="bits a weight", y="perplexity", line=(exact, "unquantised"))
