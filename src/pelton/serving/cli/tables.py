"""Plain aligned text: readable in a terminal, a log and a pipe alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


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
