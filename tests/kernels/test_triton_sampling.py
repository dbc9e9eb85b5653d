"""Edits of logits and what brings a step's inputs in, in Triton's interpreter; see also ``tests/gpu``."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kernels.test_cuda_tactics import run

pytest.importorskip("triton")

EDIT = """
from tests.kernels.edit_cases import check_edits, check_logprobs
print("checked", sum(check_edits("cpu", vocab) + check_logprobs("cpu", vocab) for vocab in (50, 9000)))
"""
STAGE = """
from tests.kernels.stage_reference import stage_cases
print("checked", stage_cases("cpu"))
"""


@pytest.mark.parametrize(("program", "cases"), [(EDIT, 26), (STAGE, 4)])
def test_kernels_do_as_their_reference(program: str, cases: int, tmp_path: Path) -> None:
    assert f"checked {cases}" in run(program, tmp_path, TRITON_INTERPRET="1", PYTHONPATH=PATH)


PATH = ":".join(str(Path(__file__).parents[2] / part) for part in ("src", "."))
