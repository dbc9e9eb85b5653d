"""Products of e4m3 codes with a scale for each row and 128 columns (fp8_g128, layout ``rows8``) on sm_90.

Inputs are codes with a scale for each token and 128 columns: DeepSeek's checkpoints as published
(``hopper_blocks.cu``). Up to 16 tokens they stay as they are (``rows8.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from pelton.kernels.gpu_rows8 import PADDING
from pelton.kernels.launch import CallSpec, CudaBuilder, TensorMap, Term, Work
from pelton.kernels.linear.hopper_products import (
    ProductTiles,
    product_tiles,
    quantise_launch,
    reached,
    weight_map,
)
from pelton.kernels.linear.products import Form, Product, aligned
from pelton.kernels.linear.rows8 import BLOCKS, LAYOUT, supports_rows8, unpacked, unpacked_bytes
from pelton.kernels.linear.tiles import PROCESSORS
from pelton.kernels.tactic import NodeSpec, Tactic, no_codes

FILE = "linear/hopper_blocks.cu"
#: Columns of a scale, and of a unit.
GROUP = 128
#: Largest steps, tokens, that have tiles of their own; 0: any.
STEPS = (32, 64, 128, 256, 512, 0)
_ACTIVATIONS = {"": 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4}
_SHARED, _MOST_STAGES = 226 << 10, 16
#: Besides the ring, its scales and vectors of a tile: barriers, up to the first multiple of 1024 bytes.
_BESIDES = 1024 + 24 * _MOST_STAGES + 16
#: Tokens of the largest steps in which x has a copying warp of its own (measured: 128 are faster without);
#: bytes of the weight that a block then has asked for at most and not got yet.
_MOST_APART, _ON_THEIR_WAY = 64, 96 << 10
#: Sums of a thread, of a unit and of all, from which on the copying warp group gives registers up.
_UNEVEN = 128


@dataclass(frozen=True)
class BlockTiles(ProductTiles):
    """How ``hopper_blocks.cu`` takes a product."""

    ahead: bool = False
    """A unit's products are under way while the one before is scaled: a third set of sums."""


def block_tiles(n: int, k: int, tokens: int, gated: bool) -> BlockTiles:
    """As of exact e4m3, which has sums of a unit beside those of all too."""
    t = product_tiles(n, k, tokens, gated, "fp8_row", exact=True)
    return BlockTiles(t.wg_m, t.wg_n, 1, t.columns, t.split, t.share, ahead=t.columns <= 112)


def scale_row(max_tokens: int) -> int:
    """From the scales of x of some columns to those of the next, in floats: whole tiles of tokens."""
    return -(-max_tokens // 256) * 256


def x_bytes(k: int, max_tokens: int) -> int:
    """Of the codes and scales of x."""
    return aligned(max_tokens * k) + aligned(4 * (k // GROUP) * scale_row(max_tokens))


def blocks(form: Form, call: CallSpec, tiles: BlockTiles, max_tokens: int) -> tuple[Work, ...]:
    """x, normed where the form says so, as codes, and the product."""
    p = Product(form, call, max_tokens)
    x_scales = aligned(max_tokens * p.k)
    x_box = min(tiles.x_rows, -(-max_tokens // 8) * 8)
    block_rows = tiles.columns * tiles.wg_n
    assert 4 * block_rows <= PADDING, "scales of a tile are copied whole"
    x_map = TensorMap(dtype="uint8", shape=(p.k, max_tokens), strides=(p.k,), box=(GROUP, x_box))
    b = CudaBuilder(call, FILE, "blocks").tensor_map(1, weight_map(p, tiles, "uint8"))
    b = b.workspace_map(0, x_map).input(1).workspace(x_scales)
    bias = call.inputs[2] is not None
    for index in (2 if bias else None, form.residual):
        b = b.nothing() if index is None else b.input(index)
    b.output().dim(p.x.shape[0])
    cluster = tiles.split * tiles.share
    tile = block_rows // (2 if form.gated else 1)
    items = -(-p.n // tile) * -(-max_tokens // (tiles.x_rows * tiles.share))
    most = items if tiles.split > 1 else PROCESSORS // cluster  # blocks stay, and take as many items each
    clusters = -(-items // -(-items // most))
    besides = _BESIDES + (8 * tiles.columns * tiles.wg_m * tiles.wg_n if bias else 0)
    if tiles.split > 1:  # what a thread is sent: eight sums of every other sixteen
        besides += 4096 * tiles.wg_m * tiles.wg_n * -(-tiles.columns // 32)
    # Tokens that are not copied need no space, as long as something lies there.
    x_space = tiles.x_rows if x_box + block_rows < tiles.x_rows else x_box
    stage = (x_space + block_rows) * GROUP + (tiles.x_rows + block_rows) * 4
    stages = min(_MOST_STAGES, (_SHARED - besides) // stage)
    assert stages >= 2, f"{tiles} does not fit"
    window = max(1, min(stages, _ON_THEIR_WAY // (block_rows * GROUP)))
    uneven = tiles.wg_m * tiles.wg_n == 2 and (2 + tiles.ahead) * tiles.columns // 2 >= _UNEVEN
    product = b.launch(
        (Term(times=clusters * cluster),),
        constants={
            "RESULTS": p.n,
            "INNER": p.k,
            "WG_M": tiles.wg_m,
            "WG_N": tiles.wg_n,
            "COLUMNS": tiles.columns,
            "SIXTEENS": tiles.columns // 16,
            "X_BOX": x_box,
            "X_SCALES": scale_row(max_tokens),
            "STAGES": stages,
            "WINDOW": window if max_tokens <= _MOST_APART else 0,
            "SPLIT": tiles.split,
            "SHARE": tiles.share,
            "OVERLAP": int(tiles.ahead),
            "GATED": _ACTIVATIONS[p.kind],
            "BIAS": int(bias),
            "RESIDUAL": int(form.residual is not None),
            "R_ROW": 0 if form.residual is None else call.input(form.residual).strides[0],
        },
        threads=128 * tiles.wg_m * tiles.wg_n + (128 if uneven else 64),
        shared=stages * stage + besides,
        suffix="a",
        dependent=True,
    )
    quantise = quantise_launch(p, x_scales, group=GROUP, scale_row=scale_row(max_tokens))
    return quantise, product


def supports_blocks(form: Form, node: NodeSpec) -> bool:
    """Where inputs are to be codes; rows of the weight in eights."""
    weight = node.inputs[1]
    assert weight is not None
    eights = int(weight.shape[0]) % (16 if form.gated else 8) == 0
    return weight.quant == BLOCKS and eights and supports_rows8(form, node) and no_codes(node)


def block_tactics(op: str, form: Form) -> list[Tactic]:
    """The tactics of ``op``."""

    def launches(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
        p = Product(form, call, max_tokens)
        if not reached(p):
            return unpacked(form, call, max_tokens)
        return blocks(form, call, block_tiles(p.n, p.k, max_tokens, form.gated), max_tokens)

    def nbytes(node: NodeSpec, max_tokens: int) -> int:
        weight = node.inputs[1]
        assert weight is not None
        return max(x_bytes(int(weight.shape[1]), max_tokens), unpacked_bytes(form, node, max_tokens))

    return [
        Tactic(
            name=f"cuda.{op}.blocks{m or ''}",
            op=op,
            device="cuda",
            supports=lambda node: supports_blocks(form, node),
            priority=46 - i,
            precision="fp8",
            sm=90,
            largest_tokens=m,
            weight_layouts={1: LAYOUT},
            workspace=nbytes,
            launches=launches,
        )
        for i, m in enumerate(STEPS)
    ]
