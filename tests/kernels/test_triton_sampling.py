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


def test_kernels_do_as_their_reference(tmp_path: Path) -> None:
    assert "checked 26" in run(EDIT, tmp_path, TRITON_INTERPRET="1", PYTHONPATH=PATH)


PATH = ":".join(str(Path(__file__).parents[2] / part) for part in ("src", "."))
