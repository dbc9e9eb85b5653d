"""Sums in float16 on a GPU: where they are, and what an engine with them computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pelton.builder.build import build
from pelton.builder.cuda_conformance import DeviceRunner, compile_cases
from pelton.engine.artifact import open_engine
from pelton.engine.config import BuildConfig
from pelton.engine.session import Session
from pelton.ir.op import get_op
from pelton.kernels import conformance_cuda
from pelton.kernels.gpu.driver import Device
from tests.builder.random_checkpoint import RandomCheckpoint
from tests.e2e.stepper import Stepper, relative_error
from tests.gpu.conftest import WIDE
from tests.kernels import half_sums

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceRunner]:
    folder = tmp_path_factory.mktemp("half_sums") / "all"
    cases = [half_sums.rounded("gemm"), half_sums.rounded("half_sums"), *half_sums.exact()]
    assert not compile_cases(cases, Device().sm, folder)
    with DeviceRunner(folder) as found:
        yield found


def test_a_sum_of_so_many_columns_is_in_float16_and_all_others_are_not(runner: DeviceRunner) -> None:
    def of_one(case: conformance_cuda.Case) -> set[float]:
        return set(runner(case, conformance_cuda.call_of(case)).outputs[0].flatten().tolist())

    assert of_one(half_sums.rounded("gemm")) == {3.0}
    assert of_one(half_sums.rounded("half_sums")) <= {2.0, 4.0}
    for case in half_sums.exact():
        conformance_cuda.check(case, runner)


def built(path: Path, quant: str, accumulate: str) -> Path:
    config = BuildConfig(
        target="cuda", dtype="float16", max_batch_size=40, max_num_tokens=512, accumulate=accumulate
    )
    report = build(RandomCheckpoint(WIDE, quant=quant), config, output=path)
    assert report.quality is not None
    assert report.quality.runner == "cuda"
    return path


@pytest.mark.parametrize("quant", ["float16", pytest.param("int4_g128", marks=pytest.mark.slow)])
def test_an_engine_s_large_steps_move_by_its_kernels_bounds_at_most(quant: str, tmp_path: Path) -> None:
    """Errors of instructions after one another add up, at most; smaller steps are the same."""
    usual, half = (built(tmp_path / name, quant, name) for name in ("float32", "float16"))
    ops = [i.op for i in open_engine(half).plan.instructions if "half_sums" in i.tactics[-1].tactic]
    assert len(ops) == 5 * WIDE["num_hidden_layers"] - 3  # behind the last attention, rows of logits alone
    bound = sum(get_op(op).tolerance["float16_sums"] for op in ops)
    rng = np.random.default_rng(0)
    prompts = {s: rng.integers(0, 500, n).tolist() for s, n in enumerate((200, 3, 150))}
    small: dict[int, Any] = {3: prompts[0][:90]}
    with Session(usual, kv_blocks=200) as one, Session(half, kv_blocks=200) as other:
        a, b = Stepper(one), Stepper(other)
        want, got = a.step(small), b.step(small)
        np.testing.assert_array_equal(want[3], got[3])
        want, got = a.step(prompts), b.step(prompts)
        errors = [relative_error(got[s], want[s]) for s in prompts]
        print(f"{max(errors):.5f} of {bound:.5f}")
        assert 0.0 < max(errors) < bound
        # Decode steps, whose kernels are the same, of keys and values that moved.
        one_each = {s: [7] for s in prompts}
        want, got = a.step(one_each), b.step(one_each)
        assert max(relative_error(got[s], want[s]) for s in prompts) < bound
