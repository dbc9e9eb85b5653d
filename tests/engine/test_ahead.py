"""The weight that follows each instruction, as kernels fetch it ahead."""

from __future__ import annotations

from pathlib import Path

import pytest

from pelton.engine.artifact import open_engine
from pelton.engine.cuda import ahead
from pelton.engine.cuda.ahead import NextWeight, next_weights
from tests.builder.paper_gpu import build_paper_engine


def test_each_instruction_has_the_next_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = open_engine(build_paper_engine(tmp_path / "paper.engine")).plan
    assert next_weights(plan, lambda o: 64)[0] == NextWeight(), "none here is large"
    monkeypatch.setattr(ahead, "_SMALLEST", 0)
    found = next_weights(plan, lambda o: 1000 + o.buffer)
    products = [i for i in plan.instructions if "linear" in i.op]
    assert len(products) > 4
    expected = NextWeight()
    for instruction, given in reversed(list(zip(plan.instructions, found, strict=True))):
        assert given == expected
        if "linear" in instruction.op:
            operand = plan.operands[instruction.inputs[1]]
            buffer = plan.buffers[operand.buffer]
            assert buffer.kind == "weight"
            rows = operand.shape[0]
            assert isinstance(rows, int)
            expected = NextWeight(1000 + operand.buffer, buffer.nbytes // (rows // 16) // 16 * 16, rows // 16)
            assert expected.count * expected.nbytes <= buffer.nbytes
    assert found[-1] == NextWeight()
