"""The kernels around a plan's, on a GPU: a step's inputs in, tokens out."""

from __future__ import annotations

import pytest

from pelton.builder.target import gpu_available
from tests.kernels.edit_cases import check_edits, check_logprobs
from tests.kernels.sampling_cases import check, check_types
from tests.kernels.stage_reference import on_gpu, stage_cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpu_available(), reason="no GPU")]


@pytest.mark.parametrize("vocab", [50, 257, 20000, 128256])
def test_the_sampler_is_the_host_s(vocab: int) -> None:
    assert check("cuda", vocab, n=6 if vocab < 10000 else 2)  # the host's sorts take their time


@pytest.mark.parametrize("vocab", [257, 128256])
def test_the_sampler_takes_logits_of_the_network_s_type(vocab: int) -> None:
    check_types("cuda", vocab)


def test_inputs_are_laid_out() -> None:
    assert stage_cases(on_gpu())


@pytest.mark.parametrize("vocab", [50, 9000, 128256])
def test_edits_and_log_probabilities_are_the_host_s(vocab: int) -> None:
    assert check_edits("cuda", vocab)
    assert check_logprobs("cuda", vocab)
