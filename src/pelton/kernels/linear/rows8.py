"""Products with weights of 8-bit codes and a scale a row (layout ``rows8``) on sm_90.

``supports_rows8`` is the one rule of which calls take such a weight; every tactic of the layout asks it, so
that a weight has it for all steps or for none. Here: where nothing better is there, the weight is written to
the workspace as dense rows and multiplied there.
"""

from __future__ import annotations

from pelton.dtypes import ITEMSIZE
from pelton.kernels.gated_activation.cuda import KINDS
from pelton.kernels.gpu_rows8 import TYPES, row_bytes, scales_at
from pelton.kernels.launch import Builder, CallSpec, Term, Work, workspace
from pelton.kernels.linear.packed import UNPACK, X_CODES, type_constants
from pelton.kernels.linear.products import Form, Product, aligned, cublaslt, gemm, normed_bytes
from pelton.kernels.tactic import NodeSpec, Tactic

LAYOUT = "rows8"
#: Columns of a weight are a multiple of as many, the bytes of a row of a swizzled box.
COLUMNS = 128
#: Rows and columns that a program unpacks.
_TILE = (32, 128)


def supports_rows8(form: Form, node: NodeSpec) -> bool:
    """bfloat16 activations, vectors in float32 as engines have them, whole boxes of columns."""
    x, weight, *_ = node.inputs
    assert x is not None
    assert weight is not None
    vectors = [node.inputs[i] for i in (2, form.norm) if i is not None]
    rows = [x] + ([] if form.residual is None else [node.inputs[form.residual]])
    return (
        weight.quant in TYPES
        and int(weight.shape[1]) % COLUMNS == 0
        # Products of codes with codes are still mma16's.
        and node.activations != X_CODES[weight.quant]
        and all(t is None or (t.quant or t.dtype) == "float32" for t in vectors)
        and all(t is not None and t.dtype == "bfloat16" for t in rows)
        and (not form.gated or node.attrs["kind"] in KINDS)
    )


def unpacked(form: Form, call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
    """The weight as dense rows into the workspace, and a product there: cuBLASLt's where it can."""
    p = Product(form, call, max_tokens)
    stacked = int(p.weight.shape[0])
    b = Builder(call, UNPACK, "unpack_rows").input("weight", 1).workspace("out", p.scratch, dtype=p.x.dtype)
    b.constants(N=stacked, K=p.k, ROW=row_bytes(p.k), SCALES=scales_at((stacked, p.k)))
    b.constants(CODE=type_constants(p.weight.quant)["CODE"], ROWS=_TILE[0], COLUMNS=_TILE[1])
    grid = (Term(times=-(-p.k // _TILE[1])),), (Term(times=-(-stacked // _TILE[0])),)
    dense = b.launch(*grid, num_warps=4)
    # Gated, the second half of cuBLASLt's row must be aligned as pointers of the kernel behind it are.
    if call.inputs[2] is None and (not form.gated or stacked % 32 == 0):
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


def rows8_tactics(op: str, form: Form) -> list[Tactic]:
    """The tactics of ``op``."""
    return [
        Tactic(
            name=f"cuda.{op}.rows8_unpack",
            op=op,
            device="cuda",
            supports=lambda node: supports_rows8(form, node),
            priority=20,
            precision="bfloat16",
            sm=90,
            weight_layouts={1: LAYOUT},
            workspace=lambda node, tokens: unpacked_bytes(form, node, tokens),
            launches=lambda call, tokens: unpacked(form, call, tokens),
        )
    ]
