"""Writes the parts of docs/ that are made from the code.

    PYTHONPATH=src python tools/generate_docs.py [--check]

A page marks such a part with ``<!-- generated: NAME -->`` and ``<!-- end of NAME -->``; ``PARTS`` says how
each is made. ``--check`` writes nothing and fails when a page is out of date (a test does the same).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tactics() -> str:
    """All tactics by op, in the order in which they are taken without timing."""
    from pelton.kernels.tactic import all_tactics

    rows = []
    for t in sorted(all_tactics().values(), key=lambda t: (t.op, -t.priority, t.name)):
        layouts = ", ".join(f"input {i}: {layout}" for i, layout in sorted(t.weight_layouts.items()))
        same = "yes" if t.batch_invariant else "no"
        rows.append((t.op, f"`{t.name}`", t.precision, layouts or "rows", str(t.priority), same))
    return table(("op", "tactic", "precision", "weight layout", "default order", "batch-invariant"), rows)


#: Name of a generated part -> its text.
PARTS: dict[str, Callable[[], str]] = {"tactics": tactics}

_PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)


def regenerate(page: str) -> str:
    """``page`` with every generated part made anew."""
    return _PART.sub(lambda m: f"{m[1]}{PARTS[m[2]]()}\n{m[3]}", page)


def stale() -> dict[Path, str]:
    """Pages that are out of date -> what they should be."""
    pages = {path: path.read_text() for path in sorted(DOCS.glob("*.md"))}
    found = {path: regenerate(text) for path, text in pages.items() if _PART.search(text)}
    return {path: text for path, text in found.items() if text != pages[path]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a page is out of date")
    args = parser.parse_args()
    outdated = stale()
    for path, text in outdated.items():
        if not args.check:
            path.write_text(text)
        print(f"{path.name} {'is out of date' if args.check else 'written'}")
    return int(args.check and bool(outdated))


if __name__ == "__main__":
    sys.exit(main())
