"""A plan computes what the eager model computes, on both runners, at every step size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pelton.builder.eager import EagerReference
from pelton.builder.facts import model_recipes
from pelton.builder.probe import Piece, make_batch
from pelton.engine.batch import InputBatch
from pelton.engine.kv_cache import allocate
from pelton.engine.native_runner import NativeRunner
from pelton.engine.reference_runner import ReferenceRunner
from pelton.engine.session import Runner, Session
from pelton.kernels import native
from pelton.models.registry import create_model
from tests.builder.random_checkpoint import TINY_LLAMA, RandomCheckpoint

BLOCKS = 40


@pytest.fixture(scope="module", params=["reference", "native"])
def session(tiny_engine: Path, request: pytest.FixtureRequest) -> Iterator[Session]:
    if request.param == "native" and not native.available():
        pytest.skip("the native library is not built")
    with Session(tiny_engine, kv_blocks=BLOCKS, runner=request.param, threads=2) as opened:
        yield opened


@pytest.fixture(scope="module")
def eager(session: Session) -> EagerReference:
    checkpoint = RandomCheckpoint(TINY_LLAMA)
    model = create_model(checkpoint.config, max_seq_len=64)
    recipes = model_recipes(model, checkpoint.source)
    return EagerReference(model, recipes, checkpoint.read, session.config, BLOCKS)


def pieces(lengths: list[tuple[int, int]], seed: int = 0) -> list[Piece]:
    """One sequence per (tokens before, tokens now), its blocks anywhere in the pool."""
    rng = np.random.default_rng(seed)
    pool = rng.permutation(BLOCKS).astype(np.int32)
    made, used = [], 0
    for before, now in lengths:
        need = -(-(before + now) // 8)
        tokens = rng.integers(0, 101, now, dtype=np.int32)
        made.append(Piece(tokens=tokens, start=before, blocks=pool[used : used + need]))
        used += need
    return made


def steps_of(session: Session, lengths: list[tuple[int, int]], logits: list[int] | None) -> list[InputBatch]:
    """Steps that fill the caches with what came before, then the step in question."""
    now = pieces(lengths)
    earlier = []
    rng = np.random.default_rng(1)
    for piece in now:
        for start in range(0, piece.start, 40):
            tokens = rng.integers(0, 101, min(40, piece.start - start), dtype=np.int32)
            before = Piece(tokens=tokens, start=start, blocks=piece.blocks)
            earlier.append(make_batch([before], session.config))
    return [*earlier, make_batch(now, session.config, logits)]


@pytest.mark.parametrize(
    ("lengths", "logits"),
    [
        ([(0, 1)], None),
        ([(0, 1)], [0]),
        ([(7, 1)], None),
        ([(8, 1)], None),
        ([(63, 1)], None),
        ([(0, 40)], None),
        ([(0, 40)], [39]),
        ([(0, 39), (5, 1)], [38, 39]),
        ([(24, 40)], [0, 7, 8, 39]),
        ([(3, 1), (20, 1), (0, 1), (63, 1)], None),
        ([(0, 10), (0, 10), (0, 10), (0, 10)], [9, 19, 29, 39]),
        ([(0, 2), (9, 3)], []),
    ],
)
def test_a_session_equals_the_eager_model(
    session: Session, eager: EagerReference, lengths: list[tuple[int, int]], logits: list[int] | None
) -> None:
    for step in steps_of(session, lengths, logits):
        expected = eager.run(step)
        # Stacked projections may sum in another order: rounding error is all that may differ.
        logits = session.run(step).logits_NV
        assert logits.shape == (step.logits_indices_N.size, 101)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)


def test_results_do_not_depend_on_what_the_arena_holds(session: Session) -> None:
    """The plan runs on an arena of NaN before each step and gives the same bits."""
    caches = allocate(session.config, (BLOCKS,))
    arguments = (session.engine.plan, session.engine.weights, caches, 2)
    poisoned: Runner
    if session.runner_name == "native":
        poisoned = NativeRunner(*arguments, poison=True)
    else:
        poisoned = ReferenceRunner(*arguments, poison=True)
    for step in steps_of(session, [(0, 17), (12, 3)], None):
        expected = session.run(step).logits_NV
        np.testing.assert_array_equal(poisoned.run(step, ()).logits_NV, expected)
    poisoned.close()


def test_every_intermediate_tensor_can_be_an_output(session: Session) -> None:
    step = make_batch(pieces([(0, 9), (0, 4)]), session.config)
    plain = session.run(step).logits_NV.copy()
    names = sorted(session._names)
    result = session.run(step, names)
    assert sorted(result.outputs) == names
    np.testing.assert_array_equal(result.logits_NV, plain)
    np.testing.assert_array_equal(result.outputs["lm_head.linear"], plain)
    assert result.outputs["model.layers.1.self_attn.paged_attention"].shape == (13, 4, 16)
    # Taken when produced: the arena has been reused by the end of the step.
    embedded = result.outputs["model.embed_tokens.embedding"]
    weight = RandomCheckpoint(TINY_LLAMA).read("model.embed_tokens.weight").data
    np.testing.assert_array_equal(embedded, weight[step.input_ids_T])


def test_the_arena_is_shared_by_buffers_that_are_not_alive_together(session: Session) -> None:
    plan = session.engine.plan
    arena = [b for b in plan.buffers if b.kind == "arena"]
    assert plan.arena_bytes < sum(b.nbytes for b in arena) / 2
    assert {b.offset % 64 for b in arena} == {0}
    assert plan.dims == {"T": 40, "B": 4, "N": 40}


def test_tied_weights_are_stored_once(session: Session) -> None:
    names = [b.name for b in session.engine.plan.buffers if b.kind == "weight"]
    assert "lm_head.weight" not in names
    users = [
        i.op
        for i in session.engine.plan.instructions
        for k in i.inputs
        if k >= 0 and session.engine.plan.operands[k].name == "model.embed_tokens.weight"
    ]
    assert users == ["embedding", "linear"]
