"""Where all rows are taken, their source stands for them, and only where its memory stays as it is."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")

from pelton.engine.artifact import open_engine
from pelton.engine.cuda.same_rows import same_rows
from pelton.engine.plan import Plan
from pelton.engine.session import Session
from pelton.kernels.gpu.null import null_gpu
from tests.builder.paper_gpu import build_paper_engine


@pytest.fixture(scope="module", params=[4, 100], ids=["few rows", "more rows than tokens"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In the second, what rows are taken to is larger than what they are taken of."""
    path = tmp_path_factory.mktemp("gpu") / "paper.engine"
    return build_paper_engine(path, max_batch_size=request.param, max_num_tokens=128)


def taken(plan: Plan) -> list[int]:
    return [i for i, instruction in enumerate(plan.instructions) if instruction.op == "take_rows"]


def test_every_row_of_a_plan_may_be_left_where_it_is(engine: Path) -> None:
    plan = open_engine(engine).plan
    found = same_rows(plan)
    assert len(found) == len(taken(plan)) == 2
    for i in taken(plan):
        assert found[plan.instructions[i].outputs[0]] == plan.instructions[i].inputs[0]


def test_what_is_written_over_too_early_stands_for_nothing(engine: Path) -> None:
    plan = open_engine(engine).plan
    first, second = taken(plan)
    reader = next(i for i in plan.instructions if plan.instructions[first].outputs[0] in i.inputs)
    source = plan.operands[plan.instructions[first].inputs[0]].buffer
    for writer in (plan.instructions[second], reader):
        target = plan.operands[writer.outputs[0]].buffer
        buffers = list(plan.buffers)
        offset = plan.buffers[source].offset + plan.buffers[source].nbytes - 64
        buffers[target] = msgspec.structs.replace(buffers[target], offset=offset)
        moved = msgspec.structs.replace(plan, buffers=tuple(buffers))
        assert plan.instructions[first].outputs[0] not in same_rows(moved), writer.op


def test_a_decode_step_of_all_rows_launches_less(engine: Path) -> None:
    with null_gpu() as gpu, Session(engine, kv_blocks=8) as session:
        launcher, stream = session._runner._launcher, session._runner._stream  # type: ignore[union-attr]

        def launches(rows: int, watched: bool = False) -> int:
            before = gpu.launches
            after = (lambda index: None) if watched else None
            launcher.run(stream, {"T": 3, "B": 3, "B+1": 4, "N": rows}, after, decodes=True)
            return gpu.launches - before

        assert launches(3) == launches(2) - 2
        assert launches(3, watched=True) == launches(2), "whoever looks at operands finds all of them"
