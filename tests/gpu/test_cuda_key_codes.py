"""Codes of keys that are stored less a vector and rounded by their queries, on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pelton.builder.cuda_conformance import DeviceRunner, compile_cases
from pelton.kernels import conformance_cuda
from pelton.kernels.gpu.driver import Device
from pelton.kernels.tactic import FP8_SM, all_tactics
from tests.kernels import key_codes

pytestmark = pytest.mark.gpu
FP8 = torch.float8_e4m3fn
#: Op, what writes its keys.
WRITERS = [
    ("kv_write", "cuda.kv_write"),
    ("rope_kv_write", "cuda.rope_kv_write"),
    ("rope_paged_attention", "cuda.rope_paged_attention.any"),
    ("rope_paged_attention", "cuda.rope_paged_attention.hopper8.any"),
]


def test_keys_get_the_reference_s_codes_but_for_ties(tmp_path: Path) -> None:
    sm = Device().sm
    if sm < FP8_SM:
        pytest.skip("fp8 needs a GPU that converts it")
    cases = [
        key_codes.case_of(op, all_tactics()[name], key_codes.sample_of(op, FP8, dim=dim), "bfloat16")
        for dim in (64, 128)
        for op, name in WRITERS
        if all_tactics()[name].sm in (0, sm)
    ]
    assert not compile_cases(cases, sm, tmp_path / "kernels")
    with DeviceRunner(tmp_path / "kernels") as runner:
        for case in cases:
            call = conformance_cuda.call_of(case)
            result = runner(case, call)
            cache = result.inputs[next(iter(call.wanted))]
            assert cache is not None
            share = key_codes.check_codes(case.op, case.sample, cache)
            print(f"{case}: {share:.2%} of keys differ")
            assert share < 0.05
