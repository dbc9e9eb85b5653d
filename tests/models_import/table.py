"""Writes the table of docs/importing-models.md: builds a tiny engine of every family and reads its plan.

PYTHONPATH=src:. python -m tests.models_import.table
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from pathlib import Path

import msgspec

import pelton
from tests.models_import.families import FAMILIES, make_model, write_checkpoint

PAGE = Path(__file__).parents[2] / "docs" / "importing-models.md"
GENERIC = {"unary", "binary", "binary_scalar", "reduce", "softmax", "copy", "mul", "scale"}
_TABLE = re.compile(r"(<!-- families -->\n).*?(<!-- end of families -->)", re.DOTALL)


def row(family: str, folder: Path) -> str:
    """The family's line: a model of three layers in float32."""
    model = make_model(family)
    checkpoint = write_checkpoint(model, folder / family)
    config = pelton.BuildConfig(
        dtype="float32", kv_dtype="float32", max_seq_len=96, block_size=8, timing=False
    )
    report = pelton.build(checkpoint, config, output=folder / "x.engine")
    assert report.quality is not None
    plan = msgspec.json.decode((folder / "x.engine" / "plan.json").read_bytes())
    ops = Counter(instruction["op"] for instruction in plan["instructions"])
    native = all(instruction["tactics"] for instruction in plan["instructions"])
    left = ", ".join(f"{op} {n}" for op, n in sorted(ops.items()) if op in GENERIC)
    cells = (
        f"`{family}`",
        type(model).__name__,
        "yes" if native and report.quality.runner == "native" else "no",
        str(sum(ops.values())),
        left or "none",
        f"{report.quality.max_error:.0e}",
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    header = (
        "| model_type | class | all native | instructions | generic ones | error |\n|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        rows = [row(family, Path(folder)) for family in FAMILIES]
    table = "\n".join((header, *rows))
    PAGE.write_text(_TABLE.sub(lambda m: f"{m[1]}{table}\n{m[2]}", PAGE.read_text()))
    print(table)


if __name__ == "__main__":
    main()
