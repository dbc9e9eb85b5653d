"""Engines of a model whose attention has sinks, which a package outside Pelton defines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import pelton
from pelton.engine.artifact import open_engine
from pelton.runtime.config import ExecutorConfig
from pelton.runtime.executor import Executor
from tests.builder.random_checkpoint import RandomCheckpoint
from tests.e2e.stepper import Stepper, relative_error
from tests.e2e.test_architectures import EXACT, SMALL
from tests.e2e.test_equivalence import Driver, greedy
from tests.models.sink_model import SINKS, eager_logits

CHECKPOINT = RandomCheckpoint(SINKS)


def wanted(ids: list[int], **changed: torch.Tensor) -> np.ndarray:
    def read(name: str) -> torch.Tensor:
        found = changed.get(name.rpartition(".")[2])
        return torch.from_numpy(CHECKPOINT.read(name).data) if found is None else found

    return eager_logits(SINKS, read, ids).numpy()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sinks") / "x.engine"
    pelton.build(CHECKPOINT, pelton.BuildConfig(**EXACT, **SMALL), output=path)
    return path


def prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, SINKS["vocab_size"], n).tolist() for n in lengths]


def test_logits_are_those_of_plain_pytorch_in_prefills_chunks_and_decodes(engine: Path) -> None:
    texts = prompts(50, 21, 1)
    want = [wanted(ids) for ids in texts]
    assert relative_error(wanted(texts[0], sinks=torch.full((4,), -100.0)), want[0]) > 1e-2
    with pelton.Session(engine, threads=2) as session:
        stepper = Stepper(session)
        got = stepper.step({0: texts[0][:25], 1: texts[1][:9], 2: texts[2]}, rows="all")
        assert relative_error(got[0], want[0][:25]) < 1e-4
        assert relative_error(got[1], want[1][:9]) < 1e-4
        assert relative_error(got[2], want[2]) < 1e-4
        got = stepper.step({1: texts[1][9:], 0: texts[0][25:26]}, rows="all")
        assert relative_error(got[1], want[1][9:]) < 1e-4
        for i in range(26, 50):
            got = stepper.step({0: texts[0][i : i + 1]})
            assert relative_error(got[0], want[0][i : i + 1]) < 1e-4, f"position {i}"


def test_solo_batched_chunked_and_cached_answers_are_equal(engine: Path) -> None:
    asked = prompts(40, 7, 33, 40)
    asked.append(asked[0])  # a full prefix hit
    with pelton.Session(engine, threads=2) as session:
        solo = []
        for prompt in asked:
            driver = Driver(Executor(session, ExecutorConfig(enable_prefix_caching=False)))
            driver.executor.add(greedy("solo", prompt, 10))
            driver.drain()
            solo.append(driver.answers["solo"])
            driver.executor.close()
        for config in (ExecutorConfig(enable_prefix_caching=False), ExecutorConfig(max_num_batched_tokens=9)):
            driver = Driver(Executor(session, config))
            for again in range(2):  # the second time finds a filled prefix cache
                for i, prompt in enumerate(asked):
                    driver.executor.add(greedy(f"{again}.{i}", prompt, 10))
                driver.drain()
            assert [driver.answers[f"{again}.{i}"] for again in range(2) for i in range(5)] == 2 * solo
            driver.executor.close()


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_keys_of_8_bits_are_stored_as_they_are(kv_dtype: str, dry: bool, tmp_path: Path) -> None:
    """A vector taken from all keys would be seen by the softmax: the sink does not lose what scores lose."""
    config = pelton.BuildConfig(**EXACT | {"kv_dtype": kv_dtype}, **SMALL)
    report = pelton.build(CHECKPOINT, config, output=tmp_path / "x.engine", dry_run=dry)
    if dry:
        assert any(("would see a shift" in p.note) == (kv_dtype == "fp8") for p in report.passes)
        return
    names = {b.name for b in open_engine(tmp_path / "x.engine").plan.buffers}
    assert "k_scale.1" in names
    assert "k_shift.1" not in names
    (ids,) = prompts(40)
    with pelton.Session(tmp_path / "x.engine", threads=1) as session:
        got = Stepper(session).step({0: ids}, rows="all")[0]
    assert 0 < relative_error(got, wanted(ids)) < 0.1
