"""An engine on a GPU against the same plan on the PyTorch reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pelton.builder.build import build
from pelton.builder.target import gpu_available
from pelton.engine.config import BuildConfig
from pelton.engine.session import Session
from tests.builder.random_checkpoint import TINY_LLAMA, RandomCheckpoint
from tests.e2e.stepper import Stepper, relative_error

pytestmark = pytest.mark.gpu

CONFIG = TINY_LLAMA | {
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 512,
}
#: Rounding to 8 bits of mantissa, twice as often as a layer has steps.
BOUND = {"bfloat16": 3e-2, "float32": 1e-4}


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    if not gpu_available():
        pytest.skip("no GPU")
    path = tmp_path_factory.mktemp("engines") / "tiny.engine"
    checkpoint = RandomCheckpoint(CONFIG, quant=request.param)
    report = build(checkpoint, BuildConfig(target="cuda", max_batch_size=40), output=path)
    assert report.quality is not None
    assert report.quality.runner == "cuda"
    return path, request.param


def prompts(n: int, seed: int = 0) -> dict[int, list[int]]:
    rng = np.random.default_rng(seed)
    return {i: rng.integers(0, 500, int(rng.integers(1, 90))).tolist() for i in range(n)}


def test_logits_are_the_reference_s(engine: tuple[Path, str]) -> None:
    path, dtype = engine
    with Session(path, kv_blocks=400) as gpu, Session(path, kv_blocks=400, runner="reference") as reference:
        a, b = Stepper(gpu), Stepper(reference)
        for new in (prompts(5), {0: [3], 2: [4], 3: [5]}, {0: [6], 1: [7, 8, 9], 4: [1]}, {2: [11]}):
            got, want = a.step(new), b.step(new)
            for s in new:
                assert relative_error(got[s], want[s]) < BOUND[dtype]


def test_decoding_by_graphs_equals_decoding_step_by_step(engine: tuple[Path, str]) -> None:
    path, _ = engine
    with Session(path, kv_blocks=600) as graphs, Session(path, kv_blocks=600) as eager:
        eager._runner._sizes = ()  # type: ignore[union-attr]
        a, b = Stepper(graphs), Stepper(eager)
        for n in (1, 2, 3, 9, 17, 33, 40):
            new = prompts(n, seed=n)
            new = {100 * n + i: ids for i, ids in new.items()}
            np.testing.assert_array_equal(_stack(a.step(new)), _stack(b.step(new)))
            for _ in range(2):
                one = {s: [7] for s in new}
                np.testing.assert_array_equal(_stack(a.step(one)), _stack(b.step(one)))


def test_named_tensors_come_back(engine: tuple[Path, str]) -> None:
    path, dtype = engine
    with Session(path, kv_blocks=100) as gpu, Session(path, kv_blocks=100, runner="reference") as reference:
        batch_of = Stepper(gpu)
        name = next(o.name for o in gpu.engine.plan.operands if o.name.endswith("paged_attention"))
        seen = {}
        for session in (gpu, reference):
            stepper = Stepper(session)
            run = session.run
            session.run = lambda batch, run=run: seen.setdefault(id(run), run(batch, [name]))  # type: ignore
            stepper.step({0: [1, 2, 3]})
        x, y = (result.outputs[name].astype(np.float32) for result in seen.values())
        assert relative_error(x, y) < BOUND[dtype]
        del batch_of


def _stack(logits: dict[int, np.ndarray]) -> np.ndarray:
    return np.concatenate(list(logits.values()))
