"""Tables: plain aligned text in a log or a pipe, and drawn by rich in a terminal where it is installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click


def table(title: str, rows: Sequence[Sequence[Any]], header: Sequence[str] = ()) -> str:
    """``rows`` with columns as wide as their widest cell, under ``title``."""
    cells = [[str(cell) for cell in row] for row in ([header] if header else []) + list(rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))] if cells else []
    lines = [title] if title else []
    for row in cells:
        lines.append(
            "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    return "\n".join(lines)


def show(title: str, rows: Sequence[Sequence[Any]], header: Sequence[str] = ()) -> None:
    """Print a ``table``."""
    if sys.stdout.isatty() and header:
        try:
            from rich import box
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            drawn = Table(*header, title=title or None, title_justify="left", box=box.SIMPLE_HEAD)
            for row in rows:
                drawn.add_row(*(_escape(str(cell)) for cell in row))
            Console(file=sys.stdout).print(drawn)
            return
    click.echo(table(title, rows, header))


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
