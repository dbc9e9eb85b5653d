"""How products of codes with a scale for 128 columns are dealt out on sm_90; their kernels compile."""

from __future__ import annotations

import pytest
from tests.kernels.test_cuda_sources import needs_nvrtc
from tests.kernels.test_hopper_products import FORMS, REGISTERS, SHAPES, SHARED, call

from pelton.builder.cubins import compile_kernel
from pelton.kernels.launch import CudaSource, LaunchSpec
from pelton.kernels.linear.hopper_blocks import STEPS, block_tiles, blocks
from pelton.kernels.linear.products import Form


def source(n: int, k: int, tokens: int, form: Form) -> CudaSource:
    """The product's kernel as an engine takes it."""
    _, product = blocks(form, call(n, k, form, "fp8_g128"), block_tiles(n, k, tokens, form.gated), tokens)
    assert isinstance(product, LaunchSpec)
    assert isinstance(product.kernel, CudaSource)
    return product.kernel


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_tiles_fit(n: int, k: int, form: Form) -> None:
    for tokens in (17, *(step or 2048 for step in STEPS)):
        kernel, tiles = source(n, k, tokens, form), block_tiles(n, k, tokens, form.gated)
        constants = dict(kernel.constants)
        assert kernel.shared <= SHARED
        assert constants["STAGES"] >= 3
        assert constants["WINDOW"] == 0 or 3 <= constants["WINDOW"] <= constants["STAGES"]
        sums = 128 * tiles.wg_m * tiles.wg_n * tiles.columns // 2 * (2 + tiles.ahead)
        assert sums <= 0.75 * REGISTERS


@needs_nvrtc
@pytest.mark.parametrize(
    ("n", "k", "tokens", "form"),
    [
        (6144, 4096, 64, Form(norm=3)),  # a warp group alone, which keeps all registers
        *(
            pytest.param(n, k, tokens or 2048, form, marks=pytest.mark.slow)
            for n, k, form in (
                (6144, 4096, Form(norm=3)),
                (4096, 4096, Form(residual=3)),
                (14336, 4096, Form(gated=True, norm=3)),
                (4096, 14336, Form(residual=3)),
            )
            for tokens in STEPS
        ),
    ],
)
def test_kernels_compile_without_spilling(n: int, k: int, tokens: int, form: Form) -> None:
    cubin = compile_kernel(source(n, k, tokens, form), 90)
    assert cubin.scratch == 0
