"""The package as a whole: what importing it costs, and what its public names are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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


BUILD_AND_RUN = """
import sys

for name in ("triton", "transformers", "fastapi", "zmq", "openai"):
    sys.modules[name] = None  # importing it fails
from pelton.builder.build import build
from pelton.engine.config import BuildConfig
from pelton.engine.session import Session
from tests.builder.random_checkpoint import TINY_LLAMA, RandomCheckpoint
from tests.e2e.stepper import Stepper

build(RandomCheckpoint(TINY_LLAMA, quant="q4_0"), BuildConfig(fast_build=True), output=sys.argv[1])
with Session(sys.argv[1]) as session:
    print(Stepper(session).step({0: [1, 2, 3]})[0].shape)
"""


def test_a_cpu_engine_is_built_and_run_without_what_only_others_need(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUILD_AND_RUN, str(tmp_path / "tiny.engine")]
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == "(1, 101)"
