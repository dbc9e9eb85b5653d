"""CUDA tactics against their ops' references, on a GPU."""

from __future__ import annotations

import pytest
import torch

from pelton.ir.op import all_ops
from pelton.kernels import conformance_cuda

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", sorted(all_ops()))
def test_tactics_compute_what_their_reference_does(op: str, dtype: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    for case in conformance_cuda.cases(all_ops()[op], (dtype,)):
        conformance_cuda.check(case, "cuda")
