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
from pelton.kernels.linear.packed import w8a8
from pelton.kernels.linear.packed_few import FewTiles, few
from pelton.kernels.linear.packed_many import ManyTiles, many
from pelton.kernels.linear.packed_tiles import PACKED_STEPS, packed_tiles, w8a8_tiles
from pelton.kernels.linear.products import Form

pytest.importorskip("triton")

#: Products of 8-bit codes, to float32's rounding, with inputs rounded as ``quant`` defines it.
CODES = """
import torch
from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.op import get_op
from pelton.ir.ops import rms_norm
from pelton.kernels import conformance_cuda as c
from pelton.quant.activations import rounded_activations

checked = set()
for name in ("linear", "linear_gated", "linear_add", "norm_linear", "norm_linear_gated"):
    for case in c.cases(get_op(name), ("float32",)):
        if ".w8a8." not in case.tactic.name or case.tactic.largest_tokens != 256:
            continue
        call = c.call_of(case)
        got = c.interpret(case, call).outputs[0]
        x, weight, bias, *rest = case.sample.args
        if name.startswith("norm"):
            x = rms_norm.reference(x, *rest[-2:])
            rest = rest[:-2]
        group = 128 if case.packed[1].quant == "fp8_g128" else 0
        quant = ActivationQuant(dtype=case.tactic.precision, group=group)
        x = torch.from_numpy(rounded_activations(x.numpy(), quant))
        want = get_op(name.removeprefix("norm_")).reference(x, weight, bias, *rest)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        checked.add((name, case.packed[1].quant))
print(len(checked), "pairs")
"""


def test_products_of_codes_are_of_inputs_rounded_as_defined(tmp_path: Path) -> None:
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CODES], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[0]) >= 9


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
    works = [few(gated, call(quant, 512, 256, norm=True, gated=True), FewTiles(8, 4, 2, 1))]
    works += many(Form(), call(quant, 256, 256), ManyTiles(64, 2), 64)
    works += many(Form(gated=True), call(quant, 512, 256, gated=True), ManyTiles(128, 2), 128)
    works += many(Form(norm=3), call(quant, 256, 256, norm=True), ManyTiles(32, 2), 32)[1:]
    if quant in ("int8_row", "fp8_row"):
        works += many(gated, call(quant, 512, 256, norm=True, gated=True), ManyTiles(64, 2), 64, codes=True)[
            1:
        ]
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
            found.append(w8a8_tiles(n, k, tokens, gated, quant))
            for tiles in found:
                steps = -(-n // (16 * tiles.panels)) * -(-k // (tiles.unit * tiles.units))
                assert 1 <= tiles.programs <= steps


def test_quantised_rows_and_their_scales_do_not_overlap_in_the_workspace() -> None:
    form = Form(norm=3)
    codes, product = w8a8(
        form, call("fp8_g128", 256, 256, norm=True), w8a8_tiles(256, 256, 64, False, "fp8_g128"), 64
    )
    places = [a.offset for a in codes.arguments if a.kind == "workspace"]
    assert places[1] - places[0] >= 64 * 256
    parts = [a.offset for a in product.arguments if a.kind == "workspace" and a.offset]
    assert parts[0] == places[0]
    assert parts[1] == places[1]
    assert parts[2] >= places[1] + 64 * 2 * 4
