"""Batch-invariant products on sm_90: ``hopper_products.cu`` in steps of every size.

That kernel adds up an element of the result over the columns in order, in one register of the tensor cores,
sixteen columns (of 8-bit codes 32) at a time, however wide its tiles are, and a row of x meets no other. So a
step's size may choose the tiles, and nothing else: no columns are split among blocks, sums of exact e4m3 are
taken over in float32 at the same columns, the norm and codes of the input are made by launches of their own,
and cuBLASLt, which says nothing of its order, has no part.
"""

from __future__ import annotations

from dataclasses import replace

from pelton.kernels.launch import CallSpec, CudaSource, LaunchSpec, Work
from pelton.kernels.linear.hopper_products import (
    ProductTiles,
    code_bytes,
    code_rows,
    products,
    supports_codes,
    supports_dense_products,
)
from pelton.kernels.linear.packed import X_CODES
from pelton.kernels.linear.products import Form, Product, normed_workspace, stream
from pelton.kernels.linear.rows8 import LAYOUT, unpacked, unpacked_bytes
from pelton.kernels.linear.tiles import PROCESSORS, invariant_tiles
from pelton.kernels.tactic import NodeSpec, Tactic

#: Tokens of the largest steps that have tiles of their own; 0: any.
STEPS, CODE_STEPS = (8, 32, 64, 128, 256, 512, 0), (8, 32, 64, 128, 256, 0)
#: Before every other batch-invariant tactic, behind all that are not.
_PRIORITY = 5
#: Rows of the weight, in sixteens, that one warp group alone has where rows of x are few.
_ALONE = 3
#: Runs of units of exact e4m3 (``hopper_products.cu``: PROMOTE).
_RUN = 4


def whole_tiles(n: int, x_rows: int, gated: bool, quant: str, *, exact: bool) -> ProductTiles:
    """For ``n`` results of so many rows of x: a block for every multiprocessor, each with whole columns."""
    rows = 2 * n if gated else n
    promote = _RUN if exact and quant == "fp8_row" else 0
    if x_rows <= 64:
        wg_m, wg_n = 1, 1 if rows <= 16 * _ALONE * PROCESSORS else 2
    else:
        wg_m, wg_n = 2, 1
    most = 192 if promote and wg_n == 1 else 256 // wg_n
    all_rows = rows * -(-x_rows // (64 * wg_m))  # as if tiles of x lay behind each other
    each = -(-all_rows // (most * wg_n * PROCESSORS))  # tiles of a block
    columns = min(most, -(-all_rows // (each * PROCESSORS * 16 * wg_n)) * 16)
    shared = x_rows > 128 and each > 1 and columns % (32 if gated else 16) == 0
    return ProductTiles(wg_m, wg_n, 1, columns, 1, 2 if shared else 1, promote)


def _products(form: Form, call: CallSpec, max_tokens: int, *, exact: bool) -> tuple[Work, ...]:
    p = Product(form, call, max_tokens)
    quant = p.weight.quant
    x_rows = code_rows(max_tokens, exact) if quant else max_tokens
    tiles = whole_tiles(p.n, x_rows, form.gated, quant, exact=exact)
    *before, product = products(form, call, tiles, max_tokens, exact=exact)
    assert isinstance(product, LaunchSpec)
    assert isinstance(product.kernel, CudaSource)
    # No product of cuBLASLt runs beside it.
    return *before, replace(product, kernel=replace(product.kernel, dependent=True))


def invariant_tactics(op: str, form: Form) -> list[Tactic]:
    """The tactics of ``op``: of weights of 16 bits and of 8-bit codes."""

    def dense(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
        p = Product(form, call, max_tokens)
        if not p.copies():
            return stream(form, call, invariant_tiles(p.n, p.itemsize, form.gated), max_tokens)
        return _products(form, call, max_tokens, exact=False)

    def coded(name: str, codes: str) -> Tactic:
        """``codes``: type of the input's codes; "": exact."""

        def supports(node: NodeSpec) -> bool:
            weight = node.inputs[1]
            assert weight is not None
            asked = X_CODES.get(weight.quant) == node.activations
            return supports_codes(form, node) and (
                asked and node.activations == codes if codes else not asked
            )

        def launches(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
            if not Product(form, call, max_tokens).copies():
                return unpacked(form, call, max_tokens, invariant=True)
            return _products(form, call, max_tokens, exact=not codes)

        def nbytes(node: NodeSpec, max_tokens: int) -> int:
            weight = node.inputs[1]
            assert weight is not None
            used, _ = code_bytes(int(weight.shape[1]), max_tokens, not codes)
            return max(used, unpacked_bytes(form, node, max_tokens))

        return Tactic(
            name=f"cuda.{op}.{name}",
            op=op,
            device="cuda",
            supports=supports,
            priority=_PRIORITY,
            precision=codes or "bfloat16",
            batch_invariant=True,
            sm=90,
            weight_layouts={1: LAYOUT},
            workspace=nbytes,
            launches=launches,
        )

    whole = Tactic(
        name=f"cuda.{op}.hopper_invariant",
        op=op,
        device="cuda",
        supports=lambda node: supports_dense_products(form, node),
        priority=_PRIORITY,
        precision="bfloat16",
        batch_invariant=True,
        sm=90,
        workspace=normed_workspace(form),
        launches=dense,
    )
    families = [(whole, STEPS), (coded("rows8_invariant", ""), CODE_STEPS)]
    families += [(coded(f"rows8_invariant.{x}", x), CODE_STEPS) for x in sorted(X_CODES.values())]
    return [
        replace(tactic, name=tactic.name.replace("invariant", f"invariant{m or ''}"), largest_tokens=m)
        for tactic, steps in families
        for m in steps
    ]
