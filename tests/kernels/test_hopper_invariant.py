"""Batch-invariant products on sm_90: in steps of every size a kernel that sums in one order."""

from __future__ import annotations

import itertools

import pytest

from pelton.kernels.launch import CallSpec, CudaSource, LaunchSpec, OperandSpec
from pelton.kernels.linear.hopper_invariant import CODE_STEPS, STEPS, invariant_tactics, whole_tiles
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
    """The tactics that support a call, by size of step."""
    found = [t for t in invariant_tactics(op, FORMS[op]) if t.supports(node(op, spec, activations))]
    return sorted(found, key=lambda t: t.order)


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
                    *(constants[name] for name in ("CODE", "EXACT", "SPLIT", "PROMOTE", "INNER", "GATED")),
                    *(work.kernel for work in before if isinstance(work, LaunchSpec)),
                )
            )
        assert len(orders) == 1
        assert next(iter(orders))[3] == 1, "whole columns"


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("quant", "exact"), [("", False), ("fp8_row", False), ("fp8_row", True), ("int8_row", True)]
)
def test_tiles_fit_and_fill_the_gpu(n: int, k: int, gated: bool, quant: str, exact: bool) -> None:
    for rows in (1, 8, 16, 32, 64, 65, 128, 256, 512, 2048, 8192):
        tiles = whole_tiles(n, rows, gated, quant, exact=exact)
        assert tiles.split == 1
        sums = 128 * tiles.wg_m * tiles.wg_n * tiles.columns // 2 * (2 if tiles.promote else 1)
        assert sums <= 0.75 * REGISTERS
        assert tiles.columns * tiles.wg_n <= 256
        each = (2 * n if gated else n) * -(-rows // tiles.x_rows)
        turns = -(-each // (PROCESSORS * tiles.columns * tiles.wg_n))
        assert turns * PROCESSORS * tiles.columns * tiles.wg_n <= 1.5 * each or each < 32 * PROCESSORS


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
