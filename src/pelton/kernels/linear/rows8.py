"""Products with weights of 8-bit codes and a scale a row (layout ``rows8``) on sm_90.

``supports_rows8`` is the one rule of which calls take such a weight; every tactic of the layout asks it, so
that a weight has it for all steps or for none. Up to 16 tokens take a kernel that memory bounds
(``hopper_rows8.cu``), with inputs as they are: rounding them to codes too, where that is asked for, would
gain nothing there. Where nothing better is there, the weight is written to the workspace as dense rows and
multiplied there.

An input with a static scale (``x_scale``) is rounded to codes in steps of more than 16 tokens, by the kernels
of ``hopper_products.py`` alone; one that is codes already is so in all steps.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from pelton.dtypes import CODE_DTYPES, ITEMSIZE
from pelton.kernels.gated_activation.cuda import KINDS
from pelton.kernels.gpu_rows8 import TYPES, row_bytes, scales_at
from pelton.kernels.launch import Builder, CallSpec, Term, Work, workspace
from pelton.kernels.linear import hopper
from pelton.kernels.linear.packed import UNPACK, X_CODES, type_constants
from pelton.kernels.linear.products import (
    MOST_NORMED,
    Form,
    Launches,
    Product,
    aligned,
    cublaslt,
    gemm,
    hopper_call,
    normed_bytes,
)
from pelton.kernels.linear.tiles import rows8_tiles
from pelton.kernels.tactic import NodeSpec, Tactic, no_codes, static_codes

LAYOUT = "rows8"
#: The type with a scale for each row and 128 columns.
BLOCKS = "fp8_g128"
#: Columns of a weight are a multiple of as many, the bytes of a row of a swizzled box.
COLUMNS = 128
#: Steps, tokens, that the kernel of few has forms for.
FEW_TOKENS = (8, 16)
#: Types of codes to which inputs are rounded.
_X_CODES = ("int8", "fp8")
#: Rows and columns that a program unpacks.
_TILE = (32, 128)


def supports_rows8(form: Form, node: NodeSpec) -> bool:
    """bfloat16 activations, vectors in float32 as engines have them, whole boxes of columns.

    Where a residual is added, x may be codes of the weight's type; gated, the result may be codes.
    """
    x, weight, *_ = node.inputs
    assert x is not None
    assert weight is not None
    vectors = [node.inputs[i] for i in (2, form.norm) if i is not None]
    codes = static_codes(node)
    coded = form.residual is not None and X_CODES.get(weight.quant) == codes and x.dtype == CODE_DTYPES[codes]
    rows = [None if coded else x] + ([] if form.residual is None else [node.inputs[form.residual]])
    return (
        weight.quant in TYPES
        # Where inputs stay as they are, codes are best in registers' order (``gpu_layouts.py``).
        and (weight.quant != BLOCKS or node.activations == "fp8")
        and int(weight.shape[1]) % COLUMNS == 0
        and all(t is None or (t.quant or t.dtype) == "float32" for t in vectors)
        and all(t is None or t.dtype == "bfloat16" for t in rows)
        and (node.attrs["kind"] in KINDS if form.gated else not node.attrs.get("y_codes"))
    )


def supports_few(form: Form, node: NodeSpec, codes: str = "") -> bool:
    """Where the norm's weight fits beside the tiles; ``codes``: to what a static scale rounds the input."""
    weight = node.inputs[1]
    assert weight is not None
    fits = form.norm is None or int(weight.shape[1]) <= MOST_NORMED
    return supports_rows8(form, node) and fits and static_codes(node) == codes


def unpacked(form: Form, call: CallSpec, max_tokens: int, *, invariant: bool = False) -> tuple[Work, ...]:
    """The weight as dense rows into the workspace, and a product there: cuBLASLt's where it can.

    ``invariant``: by the kernel whose tiles are the same in every step.
    """
    p = Product(form, call, max_tokens)
    stacked = int(p.weight.shape[0])
    b = Builder(call, UNPACK, "unpack_rows").input("weight", 1).workspace("out", p.scratch, dtype=p.x.dtype)
    b.constants(N=stacked, K=p.k, ROW=row_bytes(p.k), SCALES=scales_at((stacked, p.k)))
    kind = type_constants(p.weight.quant)
    b.constants(CODE=kind["CODE"], ROWS=_TILE[0], COLUMNS=_TILE[1], GROUP=kind["GROUP"])
    grid = (Term(times=-(-p.k // _TILE[1])),), (Term(times=-(-stacked // _TILE[0])),)
    dense = b.launch(*grid, num_warps=4)
    # Gated, the second half of cuBLASLt's row must be aligned as pointers of the kernel behind it are.
    if not invariant and call.inputs[2] is None and (not form.gated or stacked % 32 == 0):
        used = _dense_bytes(p.x.dtype, stacked, p.k)
        return dense, *cublaslt(form, call, max_tokens, workspace(p.scratch), used)
    return dense, *gemm(form, call, max_tokens, unpacked=p.scratch)


def _dense_bytes(dtype: str, n: int, k: int) -> int:
    return aligned(n * k * ITEMSIZE[dtype])


def unpacked_bytes(form: Form, node: NodeSpec, max_tokens: int) -> int:
    """Of the workspace."""
    x, weight = node.inputs[:2]
    assert x is not None
    assert weight is not None
    stacked, k = int(weight.shape[0]), int(weight.shape[1])
    total = normed_bytes(form, k, x.dtype, max_tokens) + _dense_bytes(x.dtype, stacked, k)
    return total + (max_tokens * stacked * ITEMSIZE[x.dtype] if form.gated else 0)


def few(form: Form, tokens: int) -> Launches:
    """One kernel, the norm included; ``tokens``: 8 or 16."""

    def launches(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
        p = Product(form, call, max_tokens)
        if not p.copies():
            assert not (p.coded or p.y_scale), "codes are rows as a kernel has left them"
            return unpacked(form, call, max_tokens)
        product = hopper_call(form, call, max_tokens)
        tiles = next(t for t in rows8_tiles(p.n, p.k, tokens, form.gated) if hopper.plan(product, t))
        return (hopper.product(call, product, tiles),)

    return launches


def rows8_tactics(op: str, form: Form) -> list[Tactic]:
    """The tactics of ``op``."""
    tactic = Tactic(
        name=f"cuda.{op}.rows8_unpack",
        op=op,
        device="cuda",
        supports=lambda node: supports_rows8(form, node) and no_codes(node),
        priority=20,
        precision="bfloat16",
        sm=90,
        weight_layouts={1: LAYOUT},
        workspace=lambda node, tokens: unpacked_bytes(form, node, tokens),
        launches=lambda call, tokens: unpacked(form, call, tokens),
    )
    return [
        *(
            # The fewer tokens it is for, the sooner it is taken.
            replace(
                tactic,
                name=f"cuda.{op}.rows8_few{m}" + (f"_static.{codes}" if codes else ""),
                supports=partial(supports_few, form, codes=codes),
                precision=codes or "bfloat16",
                priority=60 - i,
                largest_tokens=m,
                launches=few(form, m),
            )
            for i, m in enumerate(FEW_TOKENS)
            for codes in ("", *_X_CODES)
        ),
        tactic,
    ]
