"""How products of codes with codes are dealt out on sm_90, and where their codes lie."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from pelton.kernels.launch import (
    CallSpec,
    CudaSource,
    KernelSource,
    LaunchSpec,
    OperandSpec,
)
from pelton.kernels.linear.hopper_products import (
    ProductTiles,
    code_bytes,
    code_rows,
    dense_tactics,
    many_tiles,
    product_tactics,
    product_tiles,
    products,
)
from pelton.kernels.linear.products import Form
from pelton.kernels.linear.tiles import PROCESSORS
from pelton.kernels.tactic import NodeSpec, TensorSpec

SHAPES = ((6144, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096), (576, 1536), (8, 128))
FORMS = (Form(), Form(norm=3), Form(residual=3), Form(gated=True), Form(gated=True, norm=3))
#: Shared memory of an sm_90 block, rows of a box, registers of a block.
SHARED, BOX, REGISTERS = 227 << 10, 256, 1 << 16


def call(n: int, k: int, form: Form = FORMS[0], quant: str = "fp8_row") -> CallSpec:
    def rows(width: int) -> OperandSpec:
        return OperandSpec(dtype="bfloat16", shape=("T", width), strides=(width, 1))

    weight = OperandSpec(dtype="uint8", shape=(2 * n if form.gated else n, k), strides=(k, 1), quant=quant)
    extra = [OperandSpec(dtype="float32", shape=(k,), strides=(1,))] if form.norm is not None else []
    extra += [rows(n)] if form.residual is not None else []
    inputs = (rows(k), weight, None, *extra)
    return CallSpec(inputs=inputs, outputs=(rows(n),), attrs={"kind": "silu", "eps": 1e-5})


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_tiles_fit_and_fill_the_gpu(n: int, k: int, gated: bool, exact: bool) -> None:
    for tokens, quant in itertools.product(
        (17, 32, 64, 96, 128, 192, 256, 384, 512, 2048), ("fp8_row", "int8_row")
    ):
        rows = code_rows(tokens, exact)
        tiles = product_tiles(n, k, rows, gated, quant, exact=exact)
        form = Form(gated=gated)
        _, product = products(form, call(n, k, form, quant), tiles, tokens, exact=exact)
        assert isinstance(product, LaunchSpec)
        assert isinstance(product.kernel, CudaSource)
        constants = dict(product.kernel.constants)
        assert product.kernel.shared <= SHARED
        assert constants["STAGES"] >= 3
        assert constants["WINDOW"] == 0 or 3 <= constants["WINDOW"] <= constants["STAGES"]
        assert tiles.columns * tiles.wg_n <= BOX
        assert constants["X_BOX"] <= min(BOX, tiles.x_rows)
        sums = 128 * tiles.wg_m * tiles.wg_n * tiles.columns // 2 * (2 if tiles.promote else 1)
        assert sums <= 0.75 * REGISTERS
        if tiles.wg_m * tiles.wg_n > 2:  # only two can take registers from the copying one
            assert (2 if tiles.promote else 1) * tiles.columns // 2 < 128
        assert tiles.split * tiles.share <= 2, "clusters of four do not fill an H200"
        (blocks,) = (sum(term.value({"T": tokens}) for term in axis) for axis in product.grid)
        assert blocks % (tiles.split * tiles.share) == 0
        assert blocks <= PROCESSORS or tiles.split > 1
        stacked = (2 * n if gated else n) * -(-rows // tiles.x_rows)
        if stacked >= 32 * PROCESSORS:
            rounds = -(-blocks // PROCESSORS)
            covered = rounds * PROCESSORS * tiles.columns * tiles.wg_n // tiles.split
            assert tiles.split == 1 or covered <= 1.5 * stacked, "no block waits for a second round of few"


def test_high_and_low_codes_are_eights_of_rows_in_turn() -> None:
    assert code_rows(17, exact=True) == 48
    assert code_rows(17, exact=False) == 17
    used, scales = code_bytes(4096, 17, exact=True)
    assert scales == 48 * 4096
    assert used == scales + 256


def test_boxes_of_gate_and_up_alternate_by_eights() -> None:
    form = Form(gated=True)
    tiles = ProductTiles(2, 1, 1, 224, share=2)
    _, product = products(form, call(14336, 4096, form), tiles, 256)
    assert isinstance(product, LaunchSpec)
    weight, x = product.arguments[:2]
    assert weight.map is not None
    assert weight.map.shape == (4096, 8, 2, 1792)
    assert weight.map.strides == (4096, 14336 * 4096, 8 * 4096)
    assert weight.map.box == (128, 8, 2, 7)
    assert x.of == "workspace"
    assert x.map is not None
    assert x.map.box == (128, 128)


def test_dense_rows_are_copied_from_where_they_lie() -> None:
    rows = OperandSpec(dtype="bfloat16", shape=("T", 200), strides=(600, 1))
    dense = OperandSpec(dtype="bfloat16", shape=(64, 200), strides=(200, 1))
    out = OperandSpec(dtype="bfloat16", shape=("T", 64), strides=(64, 1))
    strided = CallSpec(inputs=(rows, dense, None), outputs=(out,))
    (product,) = products(Form(), strided, ProductTiles(1, 2, 1, 32), 40)
    assert isinstance(product, LaunchSpec)
    weight, x = product.arguments[:2]
    assert weight.map is not None
    assert (weight.map.dtype, weight.map.strides, weight.map.box) == ("bfloat16", (400,), (64, 64))
    assert x.map is not None
    assert (x.of, x.map.strides, x.map.box) == ("input", (1200,), (64, 40))
    (tactic, *_) = dense_tactics("linear", Form())
    assert tactic.launches is not None
    (same,) = tactic.launches(strided, 40)
    assert isinstance(same, LaunchSpec)
    assert isinstance(same.kernel, CudaSource)
    crooked = replace(strided, inputs=(replace(rows, strides=(601, 1)), dense, None))
    (triton,) = tactic.launches(crooked, 40)
    assert isinstance(triton, LaunchSpec)
    assert isinstance(triton.kernel, KernelSource), "rows that tensor copies cannot reach"


def test_codes_are_taken_where_they_are_asked_for() -> None:
    def node(quant: str, activations: str, n: int = 512) -> NodeSpec:
        inputs = (TensorSpec(dtype="bfloat16", shape=("T", 256)), TensorSpec.of_weight(quant, (n, 256)), None)
        return NodeSpec(op="linear", inputs=inputs, attrs={}, activations=activations)

    def taken(node: NodeSpec) -> set[str]:
        found = {t.name.split(".", 2)[2] for t in product_tactics("linear", Form()) if t.supports(node)}
        return {name for name in found if "codes" in name}

    assert not taken(node("fp8_row", "float32"))
    assert not taken(node("fp8_row", "int8"))
    assert not taken(node("fp8_row", "fp8", n=33))
    fp8 = taken(node("fp8_row", "fp8"))
    assert {"rows8_codes64.fp8", "rows8_codes.fp8"} <= fp8
    assert all(name.endswith(".fp8") for name in fp8)
    assert all(name.endswith(".int8") for name in taken(node("int8_row", "int8")))


def dense(n: int, k: int, form: Form) -> CallSpec:
    weight = OperandSpec(dtype="bfloat16", shape=(2 * n if form.gated else n, k), strides=(k, 1))
    return replace(coded := call(n, k, form), inputs=(coded.inputs[0], weight, *coded.inputs[2:]))


@pytest.mark.parametrize("largest", [640, 768, 1024, 0])
def test_tiles_of_many_tokens_fit(largest: int) -> None:
    form = Form(gated=True)
    for n, k in ((14336, 4096), (11008, 4096), (1536, 576), (8, 64), (64, 128)):
        (product,) = products(form, dense(n, k, form), many_tiles(2 * n, largest), largest or 8192)
        assert isinstance(product, LaunchSpec)
        assert isinstance(product.kernel, CudaSource)
        assert product.kernel.shared <= SHARED
        constants = dict(product.kernel.constants)
        assert constants["COLUMNS"] % (16 * constants["SHARE"]) == 0


def test_tiles_of_many_tokens_leave_few_multiprocessors_idle() -> None:
    for largest, tokens in ((640, 640), (768, 768), (1024, 1024), (0, 2048), (0, 8192)):
        tiles = many_tiles(28672, largest)
        clusters = PROCESSORS // tiles.share
        items = -(-28672 // tiles.columns) * -(-tokens // (128 * tiles.share))
        assert 28672 * tokens / (-(-items // clusters) * tiles.columns * 128 * PROCESSORS) > 0.95
