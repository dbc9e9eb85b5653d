"""Batch-invariant products on sm_90: of each kind of weight one kernel in steps of every size.

``hopper_products.cu`` adds up an element of the result over the columns in order, in one register of the
tensor cores, sixteen columns (of 8-bit codes 32) at a time, however wide its tiles are, and a row of x
meets no other. So a step's size may choose the tiles, and nothing else: the norm and codes of the input are
made by launches of their own, and cuBLASLt, which says nothing of its order, has no part.

Where rows of the weight are few, both halves of the columns have a sum, and these are added: in small steps
two blocks of a cluster have one each (SPLIT), in large ones a block has both, one after the other
(PROMOTE).

Packed weights have ``hopper_wide.cu``, whose blocks and warp groups share the columns of a row in the same
way in every step.
"""

from __future__ import annotations

from dataclasses import replace

from pelton.dtypes import ITEMSIZE
from pelton.kernels.launch import CallSpec, CudaSource, LaunchSpec, Work
from pelton.kernels.linear.hopper_products import (
    ROW_BYTES,
    ProductTiles,
    code_bytes,
    code_rows,
    many_tiles,
    products,
    reached,
    supports_codes,
    supports_dense_products,
)
from pelton.kernels.linear.packed import LAYOUT as PACKED
from pelton.kernels.linear.packed import X_CODES
from pelton.kernels.linear.packed_wide import supports_wide, wide, wide_tiles
from pelton.kernels.linear.products import Form, Product, normed_workspace, stream
from pelton.kernels.linear.rows8 import LAYOUT, unpacked, unpacked_bytes
from pelton.kernels.linear.tiles import PROCESSORS, invariant_tiles
from pelton.kernels.tactic import NodeSpec, Tactic, static_codes

#: Tokens of the largest steps that have tiles of their own; 0: any.
STEPS, CODE_STEPS, PACKED_STEPS = (8, 32, 64, 128, 256, 512, 0), (8, 32, 64, 128, 256, 0), (32, 0)
#: Tokens of a tile of packed weights' products, in all but the smallest steps.
_PACKED_TILE = 64
#: Before every other batch-invariant tactic, behind all that are not; rows of codes before packed ones.
_PRIORITY, _PACKED_PRIORITY = 5, 4
#: Columns are halved where there are at most so many rows of the weight, in sixteens for each multiprocessor,
#: and at least so many units of columns.
_FEW, _LONG = 2, 8
#: Rows of x, up to which two blocks have the halves.
_APART = 256
#: Units of exact e4m3 between additions in float32.
_RUN = 4
#: Rows of x beyond which tiles are as in large steps of any engine, or at least in such groups of tiles of x.
_MANY, _GROUP = 1024, 16


def halved(rows: int, k: int, itemsize: int, *, exact: bool) -> bool:
    """Whether results of ``rows`` rows of the weight are sums of two halves, in every step."""
    units = -(-k * itemsize // ROW_BYTES)
    return not exact and rows <= 16 * _FEW * PROCESSORS and units >= _LONG and units % 2 == 0


def step_tiles(
    rows: int, k: int, itemsize: int, x_rows: int, *, gated: bool, quant: str, exact: bool
) -> ProductTiles:
    """For ``rows`` rows of the weight and so many of x; measured on an H200.

    As many tiles as there are multiprocessors, or a multiple.
    """
    halves = halved(rows, k, itemsize, exact=exact)
    split = 2 if halves and x_rows <= _APART else 1
    promote = _RUN if exact and quant == "fp8_row" else 0
    if halves and split == 1:
        promote = -(-k * itemsize // ROW_BYTES) // 2
    if x_rows > _MANY and not promote:
        return many_tiles(rows, 0)
    wg_m, most = (1, 112) if x_rows <= 64 else (2, 192 if promote else 256)
    all_rows = rows * split * -(-x_rows // (64 * wg_m))  # as if tiles of x lay behind each other
    each = -(-all_rows // (most * PROCESSORS))  # tiles of a block
    columns = min(most, -(-all_rows // (each * PROCESSORS * 16)) * 16)
    share = 2 if x_rows > 128 and split == 1 and columns % (32 if gated else 16) == 0 else 1
    tiles = ProductTiles(wg_m, 1, 1, columns, split, share, promote)
    return replace(tiles, group=_GROUP) if x_rows > _MANY else tiles


def _products(form: Form, call: CallSpec, max_tokens: int, *, exact: bool) -> tuple[Work, ...]:
    p = Product(form, call, max_tokens)
    quant = p.weight.quant
    x_rows = code_rows(max_tokens, exact) if quant else max_tokens
    rows, item = int(p.weight.shape[0]), 1 if quant else ITEMSIZE[p.weight.dtype]
    tiles = step_tiles(rows, p.k, item, x_rows, gated=form.gated, quant=quant, exact=exact)
    *before, product = products(form, call, tiles, max_tokens, exact=exact)
    assert isinstance(product, LaunchSpec)
    assert isinstance(product.kernel, CudaSource)
    # No product of cuBLASLt runs beside it.
    return *before, replace(product, kernel=replace(product.kernel, dependent=True))


def invariant_tactics(op: str, form: Form) -> list[Tactic]:
    """The tactics of ``op``: of weights of 16 bits, of 8-bit codes and of packed ones."""

    def dense(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
        p = Product(form, call, max_tokens)
        if not reached(p):
            return stream(form, call, invariant_tiles(p.n, p.itemsize, form.gated), max_tokens)
        return _products(form, call, max_tokens, exact=False)

    def coded(name: str, codes: str) -> Tactic:
        """``codes``: type of the input's codes; "": exact."""

        def supports(node: NodeSpec) -> bool:
            weight = node.inputs[1]
            assert weight is not None
            asked = X_CODES.get(weight.quant) == node.activations
            if codes:
                wanted = asked and node.activations == static_codes(node, codes) == codes
            else:
                wanted = not asked and not static_codes(node)
            return wanted and supports_codes(form, node)

        def launches(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
            if not reached(Product(form, call, max_tokens)):
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

    def packed(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
        p = Product(form, call, max_tokens)
        # Blocks share columns as in small steps; of more tokens there are more tiles.
        tiles = wide_tiles(p.n, _PACKED_TILE, form.gated, p.weight.quant)
        few = max_tokens <= PACKED_STEPS[0]
        return wide(form, call, replace(tiles, tokens=PACKED_STEPS[0]) if few else tiles, max_tokens)

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
    wide_codes = replace(
        whole,
        name=f"cuda.{op}.packed_wide_invariant",
        supports=lambda node: supports_wide(form, node),
        priority=_PACKED_PRIORITY,
        weight_layouts={1: PACKED},
        launches=packed,
    )
    families = [(whole, STEPS), (wide_codes, PACKED_STEPS), (coded("rows8_invariant", ""), CODE_STEPS)]
    families += [(coded(f"rows8_invariant.{x}", x), CODE_STEPS) for x in sorted({*X_CODES.values()})]
    return [
        replace(tactic, name=tactic.name.replace("invariant", f"invariant{m or ''}"), largest_tokens=m)
        for tactic, steps in families
        for m in steps
    ]
