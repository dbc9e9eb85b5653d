"""Products with packed weights: codes multiplied as defined, sources that compile, work for every program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pelton.dtypes import GPU_BLOCK_TYPES
from pelton.kernels.gpu import nvrtc
from pelton.kernels.launch import CallSpec, OperandSpec
from pelton.kernels.linear.packed_few import FEW_STEPS, FewTiles, clusters_and_stages, few, few_tiles
from pelton.kernels.linear.packed_many import ManyTiles, many
from pelton.kernels.linear.packed_tiles import PACKED_STEPS, packed_tiles
from pelton.kernels.linear.products import Form

pytest.importorskip("triton")

#: Rows as codes and scales, their values put back in order, beside what ``quant`` defines.
CODES = """
import numpy as np
import torch
from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.group_blocks import E4M3
from pelton.ir.ops import rms_norm
from pelton.kernels.linear.triton_quantize import quantize_rows
from pelton.quant.activations import rounded_activations

k = np.arange(16)
places = k % 8 // 2 * 4 + k // 8 * 2 + k % 2
for dtype in ("int8", "fp8"):
    for tokens, width, normed in ((1, 128, False), (5, 384, True), (3, 256, False)):
        x = torch.randn(tokens, width) * 3
        x[:, 1] *= 40
        if tokens == 5:
            x[2] = 0
        gains = torch.rand(width) + 0.5
        codes = torch.zeros(tokens, width, dtype=torch.uint8)
        scales = torch.full((tokens,), float("nan"))
        block = 1 << (width - 1).bit_length()
        norm = gains if normed else None
        sizes = dict(K=width, X_ROW=width, X_CODES=dtype, BLOCK=block)
        quantize_rows[(tokens,)](x, norm, codes, scales, 1e-5, **sizes)
        q = codes.numpy().reshape(tokens, -1, 16)[..., places].reshape(tokens, width)
        values = scales.numpy()[:, None] * (q.view(np.int8) if dtype == "int8" else E4M3[q])
        seen = rms_norm.reference(x, gains, 1e-5) if normed else x
        want = rounded_activations(seen.numpy(), ActivationQuant(dtype=dtype))
        # A value halfway between two codes may fall to either side where the norm is summed in another order.
        off = np.abs(values - want) > 1e-5 * np.abs(want).max()
        assert off.mean() < 0.005, (dtype, tokens, off.mean())
print("right")
"""


def test_rows_are_quantised_as_defined(tmp_path: Path) -> None:
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CODES], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "right" in done.stdout


def call(quant: str, n: int, k: int, *, norm: bool = False, gated: bool = False) -> CallSpec:
    x = OperandSpec(dtype="bfloat16", shape=("T", k), strides=(k, 1))
    weight = OperandSpec(dtype="uint8", shape=(n, k), strides=(k, 1), quant=quant)
    gains = OperandSpec(dtype="float32", shape=(k,), strides=(1,))
    out = OperandSpec(dtype="bfloat16", shape=("T", n // 2 if gated else n), strides=(n, 1))
    inputs = (x, weight, None, gains) if norm else (x, weight, None)
    return CallSpec(inputs=inputs, outputs=(out,), attrs={"kind": "silu", "eps": 1e-5})


@pytest.mark.parametrize(
    "quant", ["int4_g128", "int4_g32", "int8_g64", "int8_row", "fp8_row", "fp8_g128", "fp4_g64"]
)
def test_sources_for_sm_90_compile(quant: str) -> None:
    if not nvrtc.available():
        pytest.skip("NVRTC is not here")
    gated = Form(gated=True, norm=3)
    works = [
        few(
            gated,
            call(quant, 512, 256, norm=True, gated=True),
            FewTiles(tokens=8, splits=2, parts=2, batch=1, cluster=1),
        )
    ]
    works += many(Form(), call(quant, 256, 256), ManyTiles(64, 2), 64)
    works += many(Form(gated=True), call(quant, 512, 256, gated=True), ManyTiles(128, 2), 128)
    works += many(Form(norm=3), call(quant, 256, 256, norm=True), ManyTiles(32, 2), 32)[1:]
    if quant in ("int8_row", "fp8_row"):
        works += many(gated, call(quant, 512, 256, norm=True, gated=True), ManyTiles(64, 2), 64, codes=True)[
            1:
        ]
    tiles = FewTiles(tokens=16, splits=1, parts=2, batch=2, cluster=2)
    works.append(few(Form(), call(quant, 256, 256), tiles))
    for work in works:
        source = work.kernel
        image = nvrtc.compile_file(source.file, "sm_90a", source.constants)
        assert image[:4] == b"\x7fELF"


@pytest.mark.parametrize("quant", GPU_BLOCK_TYPES)
@pytest.mark.parametrize(("n", "k"), [(16, 64), (40, 256), (4096, 4096), (128256, 4096)])
def test_every_program_has_work(quant: str, n: int, k: int) -> None:
    """Programs that share a tile count each other: one without work would never be counted."""
    for tokens in (1, *PACKED_STEPS, 1000):
        for gated in (False, True):
            found = [packed_tiles(n, k, tokens, gated, size, quant) for size in (2, 4)]
            for tiles in found:
                steps = -(-n // (16 * tiles.panels)) * -(-k // (tiles.unit * tiles.units))
                assert 1 <= tiles.programs <= steps


def test_quantised_rows_their_scales_and_partial_sums_do_not_overlap() -> None:
    form = Form(norm=3)
    codes, product = many(form, call("fp8_row", 256, 256, norm=True), ManyTiles(64, 2), 64, codes=True)
    places = [a.offset for a in codes.arguments if a.kind == "workspace"]
    assert places[1] - places[0] >= 64 * 256
    parts = [a.offset for a in product.arguments if a.kind == "workspace" and a.offset]
    assert parts[0] == places[1]
    assert parts[1] >= places[1] + 64 * 4
    (maps,) = (a for a in product.arguments if a.kind == "tensor_map")
    assert (maps.of, maps.offset) == ("workspace", places[0])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("quant", ["int4_g128", "int8_g32", "fp4_g64"])
@pytest.mark.parametrize(("n", "k"), [(48, 128), (576, 1536), (2304, 9216), (14336, 4096), (8192, 28672)])
def test_every_block_of_few_tokens_has_work_and_room(n: int, k: int, quant: str, gated: bool) -> None:
    form = Form(gated=gated, norm=3)
    for tokens in FEW_STEPS:
        tiles = few_tiles(form, n, k, tokens, quant)
        if tiles is None:  # x, and sums of many panels, leave no room
            assert k * tokens > 100_000
            continue
        clusters, stages = clusters_and_stages(form, n, k, quant, tiles)
        assert stages >= 1
        assert 1 <= clusters <= n // 16
        assert clusters * tiles.cluster <= 132
        assert 32 * (tiles.splits * tiles.parts + 1) <= 1024
        assert k // 128 % tiles.cluster == 0
