"""Writes the parts of docs/ that are made from the code.

    PYTHONPATH=src python tools/generate_docs.py [--check]

A page marks such a part with ``<!-- generated: NAME -->`` and ``<!-- end of NAME -->``; ``PARTS`` says how
each is made. ``--check`` writes nothing and fails when a page is out of date (a test does the same).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tactics() -> str:
    """All tactics by op, in the order in which they are taken without timing."""
    from pelton.kernels.tactic import all_tactics

    rows = []
    for t in sorted(all_tactics().values(), key=lambda t: (t.op, *t.order)):
        layouts = ", ".join(f"input {i}: {layout}" for i, layout in sorted(t.weight_layouts.items()))
        same = "yes" if t.batch_invariant else "no"
        rows.append((t.op, f"`{t.name}`", t.precision, layouts or "rows", str(t.priority), same))
    return table(("op", "tactic", "precision", "weight layout", "default order", "batch-invariant"), rows)


def passes() -> str:
    """Every pass in order."""
    from pelton.passes import PASSES

    rows = []
    for i, p in enumerate(PASSES, 1):
        after = ", ".join(f"`{name}`" for name in p.needs)
        after = after or (f"undoes `{p.undoes}`" if p.undoes else "")
        link = f"[`{p.name}`](../src/pelton/passes/{p.name}.py)"
        rows.append((str(i), link, p.kind, f"`{p.rewrite}`", after, p.bound, "yes" if p.fast else "no"))
    return table(("", "pass", "kind", "rewrite", "after", "results move by", "in a fast build"), rows)


def patterns() -> str:
    """What the passes look for that are patterns and what to do there."""
    from pelton.passes import PASSES
    from pelton.passes.pattern import show

    rows = []
    for p in PASSES:
        module = importlib.import_module(f"pelton.passes.{p.name}")
        rows += [(f"`{p.name}`", f"`{show(pattern)}`") for pattern, _ in getattr(module, "PATTERNS", ())]
    return table(("pass", "looks for"), rows)


def ops() -> str:
    """Every op of the graph, by what its file says first."""
    from pelton.ir.op import all_ops

    rows = []
    for name, op in sorted(all_ops().items()):
        text = " ".join((sys.modules[op.reference.__module__].__doc__ or "").split("\n\n")[0].split())
        what = text.partition(": ")[2] or text
        notes = ["writes in place"] * bool(op.mutates) + ["where the target has a kernel"] * op.optional
        rows.append((f"[`{name}`](../src/pelton/ir/ops/{name}.py)", what, ", ".join(notes)))
    return table(("op", "what", ""), rows)


def recipes() -> str:
    """The named recipes of quantisation."""
    from pelton.quant.config import describe, weight_bits
    from pelton.quant.recipes import RECIPES

    rows = [
        (
            f"`{name}`",
            describe(config),
            f"{weight_bits(config.weights):.2f}",
            "yes" if config.calibrated else "no",
        )
        for name, config in RECIPES.items()
    ]
    return table(("recipe", "what it does", "bits a weight", "reads text"), rows)


def combinations() -> str:
    """What goes with each type of weights."""
    from pelton.builder.write_quantized import stores
    from pelton.dtypes import GPU_BLOCK_TYPES, NATIVE_BLOCK_TYPES
    from pelton.models.checkpoint.write import FORMATS
    from pelton.quant.config import WEIGHT_TYPES, activation_types, roundings, scalings, weight_bits

    kinds: dict[tuple[str, ...], list[str]] = {}
    for quant in WEIGHT_TYPES:
        kernels = ["CPU"] * (quant in NATIVE_BLOCK_TYPES) + ["GPU"] * (quant in GPU_BLOCK_TYPES)
        parts = (
            roundings(quant),
            [s for s in scalings(quant) if s != "none"],
            activation_types(quant),
            [fmt for fmt in FORMATS if stores(fmt, quant)],
            kernels,
        )
        key = tuple(", ".join(part) or "-" for part in parts)
        kinds.setdefault(key, []).append(f"`{quant}` ({weight_bits(quant):.2f})")
    rows = [(", ".join(types), *key) for key, types in kinds.items()]
    header = ("weights (bits)", "rounding", "scaling", "activations", "formats", "kernels")
    return table(header, rows)


def measured(benchmark: str) -> str:
    """What a program in benchmarks/ measured."""
    spec = importlib.util.spec_from_file_location(benchmark, BENCHMARKS / f"{benchmark}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: str = module.table()
    return found


#: Name of a generated part -> its text.
PARTS: dict[str, Callable[[], str]] = {
    "passes": passes,
    "patterns": patterns,
    "ops": ops,
    "tactics": tactics,
    "recipes": recipes,
    "combinations": combinations,
    "quantised": partial(measured, "quantisation"),
    "peers": partial(measured, "quantisation_peers"),
}

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
