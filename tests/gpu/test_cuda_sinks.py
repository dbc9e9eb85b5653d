"""Engines of a model whose attention has sinks, on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pelton.builder.build import build
from pelton.engine.config import BuildConfig
from pelton.engine.session import Session
from tests.builder.random_checkpoint import RandomCheckpoint
from tests.e2e.stepper import Stepper, relative_error
from tests.gpu.conftest import WIDE
from tests.gpu.test_cuda_engine import BOUND, prompts
from tests.models.sink_model import SINKS

pytestmark = pytest.mark.gpu
#: Heads of 64, which kernels of sm_90 take.
CONFIG = WIDE | {name: SINKS[name] for name in ("architectures", "sliding_window", "layer_types")}


def built(path: Path, dtype: str, **options: Any) -> Path:
    config = BuildConfig(target="cuda", max_batch_size=40, max_num_tokens=300, **options)
    build(RandomCheckpoint(CONFIG, quant=dtype), config, output=path)
    return path


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "bound"),
    [
        ("bfloat16", None, BOUND["bfloat16"]),
        pytest.param("float32", None, BOUND["float32"], marks=pytest.mark.slow),
        pytest.param("bfloat16", "fp8", 5e-2, marks=pytest.mark.slow),
        pytest.param("bfloat16", "int8", 5e-2, marks=pytest.mark.slow),
    ],
)
def test_logits_are_the_reference_s(dtype: str, kv_dtype: str | None, bound: float, tmp_path: Path) -> None:
    assert largest_error(built(tmp_path / "x.engine", dtype, kv_dtype=kv_dtype)) < bound


def largest_error(path: Path) -> float:
    """Relative, of logits in prefills, decodes and mixed steps."""
    errors = []
    with Session(path, kv_blocks=400) as gpu, Session(path, kv_blocks=400, runner="reference") as reference:
        a, b = Stepper(gpu), Stepper(reference)
        steps = [prompts(5), {0: [3], 2: [4], 3: [5]}, {0: [6], 1: [7, 8, 9], 4: [1]}, {2: [11]}]
        for new in steps:
            got, want = a.step(new), b.step(new)
            errors += [relative_error(got[s], want[s]) for s in new]
    return max(errors)


def test_a_deterministic_engine_gives_a_token_the_same_bits_in_any_company(tmp_path: Path) -> None:
    check_bits(built(tmp_path / "x.engine", "bfloat16", deterministic=True))


def check_bits(path: Path) -> None:
    """Of a sequence in one step, and in chunks beside another."""
    rng = np.random.default_rng(0)
    one, two = (rng.integers(0, 500, n).tolist() for n in (40, 70))
    with Session(path, kv_blocks=400) as session:
        stepper = Stepper(session)
        whole = stepper.step({0: one}, rows="all")[0]
        chunks = [stepper.step({1: one[:7], 2: two}, rows="all")[1]]
        chunks.append(stepper.step({1: one[7:20]}, rows="all")[1])
        chunks += [stepper.step({1: [token], 2: [5]}, rows="all")[1] for token in one[20:]]
        np.testing.assert_array_equal(np.concatenate(chunks), whole)
