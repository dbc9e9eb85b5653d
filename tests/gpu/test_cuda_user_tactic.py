"""A user's Triton kernel, recorded from its launcher, right on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pelton.builder.cuda_conformance import DeviceRunner, compile_cases
from pelton.ir.op import Sample, get_op
from pelton.kernels import tactic as tactics
from pelton.kernels.conformance_cuda import Case, check
from pelton.kernels.gpu.driver import Device

pytestmark = pytest.mark.gpu


def test_a_user_s_kernel_computes_what_the_reference_does(tmp_path: Path) -> None:
    before = set(tactics.all_tactics())
    import tests.gpu.user_kernel  # noqa: F401

    (name,) = set(tactics.all_tactics()) - before
    tactic = tactics._REGISTERED.pop(name)  # other tests build without it
    wide = torch.randn(4, 200)
    cases = [
        Case(
            get_op("scale"), Sample(args=(x.to(dtype), 1.5), name=f"{tuple(x.shape)}"), tactic, str(dtype)[6:]
        )
        for dtype in (torch.float32, torch.bfloat16)
        for x in (torch.randn(5, 33), wide[:, 60:124], torch.randn(1, 576))
    ]
    assert compile_cases(cases, Device().sm, tmp_path / "kernels") == {}
    with DeviceRunner(tmp_path / "kernels") as runner:
        for case in cases:
            check(case, runner)
