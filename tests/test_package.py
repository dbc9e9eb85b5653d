"""The package as a whole: what importing it costs, and what its public names are."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import pelton

HEAVY = {"torch", "numpy", "fastapi", "pydantic", "transformers", "tokenizers", "jinja2", "rich", "zmq"}


def test_importing_pelton_loads_nothing_heavy() -> None:
    code = "import sys, json, pelton; print(json.dumps(sorted(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert HEAVY.isdisjoint(json.loads(out.stdout))


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        pelton.Nonsense  # noqa: B018
