"""Tables in docs/ that come from the code say what the code says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

from pelton.passes import PASSES

TOOL = Path(__file__).parent.parent / "tools" / "generate_docs.py"


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_are_current() -> None:
    outdated = [path.name for path in load_tool().stale()]
    assert not outdated, f"run: PYTHONPATH=src python tools/generate_docs.py (out of date: {outdated})"


def test_every_generated_part_stands_in_a_page() -> None:
    tool = load_tool()
    pages = "".join(path.read_text() for path in tool.DOCS.glob("*.md"))
    assert [name for name in tool.PARTS if f"<!-- generated: {name} -->" not in pages] == []


def test_a_part_is_replaced_between_its_marks_only() -> None:
    tool = load_tool()
    tool.PARTS = {"x": lambda: "new"}
    page = "before\n<!-- generated: x -->\nold\nold\n<!-- end of x -->\nafter\n"
    assert tool.regenerate(page) == "before\n<!-- generated: x -->\nnew\n<!-- end of x -->\nafter\n"


def test_numbers_in_the_readme_are_those_of_the_code() -> None:
    readme = (TOOL.parent.parent / "README.md").read_text()
    families = (TOOL.parent.parent / "docs" / "importing-models.md").read_text().count("\n| `")
    found = [re.search(what, readme) for what in (r"(\d+) \[passes\]", r"\[(\d+) families tested\]")]
    assert [int(match[1]) for match in found if match] == [len(PASSES), families]
