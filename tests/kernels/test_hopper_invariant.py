"""Batch-invariant products on sm_90: in steps of every size a kernel that sums in one order."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest

from pelton.kernels.launch import CallSpec, CudaSource, LaunchSpec, OperandSpec
from pelton.kernels.linear.hopper_invariant import (
    CODE_STEPS,
    PACKED_STEPS,
    STEPS,
    invariant_tactics,
    step_tiles,
)
from pelton.kernels.linear.hopper_products import code_rows, products
from pelton.kernels.linear.products import Form
from pelton.kernels.linear.tiles import PROCESSORS
from pelton.kernels.tactic import NodeSpec, Tactic, TensorSpec

FORMS = {
    "linear": Form(),
    "linear_add": Form(residual=3),
    "linear_gated": Form(gated=True),
    "norm_linear": Form(norm=3),
    "norm_linear_gated": Form(gated=True, norm=3),
}
SHAPES = ((6144, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096), (576, 1536), (16, 128))
#: Shared memory of an sm_90 block, registers of a block.
SHARED, REGISTERS = 227 << 10, 1 << 16


def call(form: Form, n: int, k: int, quant: str = "", x_row: int = 0) -> CallSpec:
    def rows(width: int) -> OperandSpec:
        return OperandSpec(dtype="bfloat16", shape=("T", width), strides=(width, 1))

    weight = OperandSpec(
        dtype="uint8" if quant else "bfloat16",
        shape=(2 * n if form.gated else n, k),
        strides=(k, 1),
        quant=quant,
    )
    extra = [OperandSpec(dtype="float32", shape=(k,), strides=(1,))] if form.norm is not None else []
    extra += [rows(n)] if form.residual is not None else []
    x = OperandSpec(dtype="bfloat16", shape=("T", k), strides=(x_row or k, 1))
    return CallSpec(inputs=(x, weight, None, *extra), outputs=(rows(n),), attrs={"kind": "silu", "eps": 1e-5})


def node(op: str, spec: CallSpec, activations: str = "bfloat16") -> NodeSpec:
    inputs = tuple(
        None if o is None else TensorSpec(dtype=o.dtype, shape=o.shape, quant=o.quant or o.dtype * (i == 1))
        for i, o in enumerate(spec.inputs)
    )
    return NodeSpec(op=op, inputs=inputs, attrs=spec.attrs, activations=activations)


def taken(op: str, spec: CallSpec, activations: str = "bfloat16") -> list[Tactic]:
    """The tactics that support a call and have the weight as the first of them has it, by size of step."""
    found = [t for t in invariant_tactics(op, FORMS[op]) if t.supports(node(op, spec, activations))]
    found.sort(key=lambda t: t.order)
    return [t for t in found if t.weight_layouts == found[0].weight_layouts]


def parts(constants: Mapping[str, int]) -> list[tuple[int, ...]]:
    """The units of columns that have a sum each, in the order in which these are added."""
    unit = 128 if constants["CODE"] else 64
    units = -(-constants["INNER"] // unit)
    split, run = constants["SPLIT"], constants["PROMOTE"]
    found = []
    for block in range(split):
        begin, end = units * block // split, units * (block + 1) // split
        assert split == 1 or not run, "sums of sums"
        found += [(i, min(i + run, end)) for i in range(begin, end, run)] if run else [(begin, end)]
    return found


@pytest.mark.parametrize("op", FORMS)
@pytest.mark.parametrize(
    ("quant", "activations"),
    [
        ("", "bfloat16"),
        ("fp8_row", "bfloat16"),
        ("int8_row", "bfloat16"),
        ("fp8_row", "fp8"),
        ("int8_row", "int8"),
    ],
)
def test_every_step_adds_up_in_the_same_order(op: str, quant: str, activations: str) -> None:
    for n, k in SHAPES:
        spec = call(FORMS[op], n, k, quant)
        tactics = taken(op, spec, activations)
        assert [t.largest_tokens for t in tactics] == [*(CODE_STEPS if quant else STEPS)]
        orders = set()
        for tactic, tokens in itertools.product(tactics, (1, 7, 300, 2048, 8192)):
            assert tactic.launches is not None
            works = tactic.launches(spec, min(tokens, tactic.largest_tokens or tokens))
            assert all(isinstance(work, LaunchSpec) for work in works), "cuBLASLt's order is not known"
            *before, product = works
            assert isinstance(product, LaunchSpec)
            assert isinstance(product.kernel, CudaSource)
            constants = dict(product.kernel.constants)
            orders.add(
                (
                    product.kernel.file,
                    tuple(parts(constants)),
                    *(constants[name] for name in ("CODE", "EXACT", "INNER", "GATED")),
                    *(work.kernel for work in before if isinstance(work, LaunchSpec)),
                )
            )
        assert len(orders) == 1


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("quant", "exact"), [("", False), ("fp8_row", False), ("fp8_row", True), ("int8_row", True)]
)
def test_tiles_fit_and_fill_the_gpu(n: int, k: int, gated: bool, quant: str, exact: bool) -> None:
    form = Form(gated=gated)
    rows = 2 * n if gated else n
    for tokens in (1, 8, 16, 32, 64, 65, 128, 256, 512, 2048, 8192):
        x_rows = code_rows(tokens, exact) if quant else tokens
        item = 1 if quant else 2
        tiles = step_tiles(rows, k, item, x_rows, gated=gated, quant=quant, exact=exact)
        *_, product = products(form, call(form, n, k, quant), tiles, tokens, exact=exact)
        assert isinstance(product, LaunchSpec)
        assert isinstance(product.kernel, CudaSource)
        assert product.kernel.shared <= SHARED
        assert dict(product.kernel.constants)["STAGES"] >= 3
        assert tiles.split == 1 or tiles.share == 1, "clusters of four do not fill an H200"
        sums = 128 * tiles.wg_m * tiles.columns // 2 * (2 if tiles.promote else 1)
        assert sums <= 0.75 * REGISTERS
        assert tiles.columns <= 256
        assert tiles.wg_m == 2 or sums < 128 * 128, "a warp group alone cannot have more registers"
        each = rows * tiles.split * -(-x_rows // tiles.x_rows)
        turns = -(-each // (PROCESSORS * tiles.columns))
        assert turns * PROCESSORS * tiles.columns <= 1.5 * each or each < 32 * PROCESSORS


@pytest.mark.parametrize("quant", ["int4_g128", "int4_g32", "int8_g64", "nf4_g64", "nvfp4", "fp8_g128"])
@pytest.mark.parametrize("op", FORMS)
def test_packed_weights_columns_are_shared_alike_in_every_step(op: str, quant: str) -> None:
    for n, k in SHAPES:
        spec = call(FORMS[op], n, k, quant)
        tactics = taken(op, spec)
        assert [t.largest_tokens for t in tactics] == [*PACKED_STEPS]
        found = set()
        for tactic, tokens in itertools.product(tactics, (1, 32, 64, 300, 8192)):
            assert tactic.launches is not None
            *_, product = tactic.launches(spec, min(tokens, tactic.largest_tokens or tokens))
            assert isinstance(product, LaunchSpec)
            constants = dict(product.kernel.constants)
            for size in ("TOKENS", "STAGES", "DEPTH"):
                del constants[size]
            found.add(tuple(constants.items()))
        assert len(found) == 1


def test_rows_out_of_reach_of_tensor_copies_have_one_kernel_for_all_steps() -> None:
    for quant in ("", "fp8_row"):
        spec = call(FORMS["linear"], 64, 256, quant, x_row=257)
        kernels = set()
        for tactic in taken("linear", spec):
            assert tactic.launches is not None
            works = tactic.launches(spec, 8 * (tactic.largest_tokens or 1000))
            kernels.add(tuple(work.kernel for work in works if isinstance(work, LaunchSpec)))
            assert all(isinstance(work, LaunchSpec) for work in works)
        assert len(kernels) == 1
