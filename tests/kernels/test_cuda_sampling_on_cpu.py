"""The sampler of GPUs (``sample.cu``), emulated on a CPU; see also ``tests/gpu``."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from tests.kernels.sampling_cases import check, check_types, logits_of, sample

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++")


@pytest.mark.parametrize(
    ("vocab", "n", "kinds"),
    [
        (50, 4, ("peaked", "flat", "ties", "masked")),
        (257, 3, ("peaked", "flat", "ties", "masked")),
        (9000, 2, ("peaked", "flat", "ties", "crowded")),
    ],
)
def test_tokens_are_the_reference_s(vocab: int, n: int, kinds: tuple[str, ...]) -> None:
    assert check("cpu", vocab, kinds, n)


def test_tokens_do_not_depend_on_how_rows_are_shared() -> None:
    n = 4
    ones = np.ones(n, np.float32)
    given = {
        "temperature": ones * np.float32(0.9),
        "top_k": np.array([0, 500, 0, 0], np.int32),
        "top_p": np.array([0.9, 1, 1, 1], np.float32),
        "min_p": np.array([0, 0, 0.01, 0], np.float32),
        "uniform": np.array([0.3, 0.6, 0.9, 0.5], np.float32),
    }
    logits = logits_of("flat", n, 9000)
    alone, shared = (sample(logits, "cpu", blocks, **given) for blocks in (1, 2))
    assert alone.tolist() == shared.tolist()


@pytest.mark.parametrize("vocab", [257, 3000])
def test_logits_may_be_of_the_network_s_type(vocab: int) -> None:
    check_types("cpu", vocab)
