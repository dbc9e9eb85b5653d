"""How products with packed weights (layout ``mma16``) are launched on GPUs, in the forms of ``products.py``.

Up to some hundred tokens a kernel decodes the weight where it multiplies it (``triton_packed.py``); beyond,
it is written to the workspace as dense rows first, and cuBLASLt multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pelton.dtypes import GGUF_BLOCK_TYPES, GPU_BLOCK_TYPES, ITEMSIZE
from pelton.kernels.gated_activation.cuda import KINDS
from pelton.kernels.gpu_layouts import PANEL, panel_bytes
from pelton.kernels.gpu_types import GPU_TYPES
from pelton.kernels.launch import (
    Builder,
    CallSpec,
    Term,
    Work,
    rows,
    workspace,
)
from pelton.kernels.linear.packed_tiles import (
    PACKED_STEPS,
    PackedTiles,
    invariant_packed_tiles,
    packed_tiles,
    unit_columns,
)
from pelton.kernels.linear.products import Form, Launches, Product, aligned, cublaslt, gemm, normed_bytes
from pelton.kernels.tactic import GPU_FLOATS, NodeSpec, Tactic, no_codes

MODULE = "pelton.kernels.linear.triton_packed"
UNPACK = "pelton.kernels.linear.triton_unpack"
#: Types whose codes are multiplied with codes of the input: which those are.
X_CODES = {"int8_row": "int8", "fp8_row": "fp8", "fp8_g128": "fp8"}
LAYOUT = "mma16"
#: By the constant CODE of CUDA C++.
CODES = ("u4", "e4m3", "s8", "u8", "e2m1", "nf4", "u5", "u6")

#: Triton's names for GGUF's scales, by the type's and whether there are offsets (``triton_gguf.py``).
_GGUF_SCALES = {
    ("float16", False): "d",
    ("float16", True): "dm",
    ("int8", False): "k",
    ("int8", True): "km",
}


def type_constants(quant: str) -> dict[str, int | str | bool]:
    """What Triton's kernels must know of a block type."""
    kind = GPU_TYPES[quant]
    scale = _GGUF_SCALES[kind.scale, kind.offset] if quant in GGUF_BLOCK_TYPES else kind.scale
    return {"CODE": kind.code, "SCALE": scale, "GROUP": kind.group, "ZERO": kind.zero}


def code_constants(quant: str) -> dict[str, int]:
    """What ``gpu/decode.cuh`` must know of a block type."""
    kind = GPU_TYPES[quant]
    return {
        "CODE": CODES.index(kind.code),
        "GROUP": kind.group,
        "HALF_SCALES": int(kind.scale == "float16"),
        "BYTE_SCALES": ("e4m3", "e8m0").index(kind.scale) + 1 if kind.scale in ("e4m3", "e8m0") else 0,
        "SUPER_SCALES": int(kind.super_scales),
        "ZERO": int(kind.zero),
        "OFFSET": int(kind.offset),
        "MIDDLE": kind.middle,
    }


def packed(
    form: Form, call: CallSpec, tiles: PackedTiles, max_tokens: int, prefetch: int = 0
) -> tuple[Work, ...]:
    """A norm into the workspace, where there is one, and the product.

    ``prefetch``: bytes of each panel that are read ahead of a dependent launch, a multiple of 16.
    """
    p = Product(form, call, max_tokens)
    b = p.builder(MODULE, "packed", normed=form.norm is not None).output("out")
    b.workspace("partial", p.scratch).counters("counters").dim("tokens", p.x.shape[0])
    b.constants(PANEL_BYTES=panel_bytes(p.weight.quant, p.k), **type_constants(p.weight.quant))
    b.constants(BLOCK_M=tiles.block_m, P=tiles.panels, UNIT=tiles.unit, UNITS=tiles.units)
    b.constants(PROGRAMS=tiles.programs, STAGES=tiles.stages, PREFETCH=prefetch)
    grid = (Term(times=tiles.programs),), (rows(p.x, tiles.block_m),)
    return *p.norm(), b.launch(*grid, num_warps=tiles.warps, dependent=True)


def whole(tiles: PackedTiles, n: int, k: int) -> bool:
    """Whether every program has whole tiles, so that none is shared."""
    k_tiles = -(-k // (tiles.unit * tiles.units))
    steps = -(-n // (16 * tiles.panels)) * k_tiles
    return steps % tiles.programs == 0 and steps // tiles.programs % k_tiles == 0


def unpacked(form: Form, call: CallSpec, max_tokens: int, *, half_sums: bool = False) -> tuple[Work, ...]:
    """For many tokens: the weight as dense rows into the workspace, and cuBLASLt's product, or ours with
    ``half_sums``."""
    p = Product(form, call, max_tokens)
    quant, stacked = p.weight.quant, int(p.weight.shape[0])
    b = Builder(call, UNPACK, "unpack").input("weight", 1).workspace("out", p.scratch, dtype=p.x.dtype)
    b.constants(N=stacked, K=p.k, PANEL_BYTES=panel_bytes(quant, p.k), **type_constants(quant))
    columns = unit_columns(quant, 128)
    b.constants(P=4, UNIT=columns)
    dense = b.launch((Term(times=-(-p.k // columns)),), (Term(times=-(-stacked // 64)),), num_warps=4)
    if half_sums:
        return dense, *gemm(form, call, max_tokens, p.scratch, half_sums=True)
    used = _dense_bytes(p.x.dtype, stacked, p.k)
    return dense, *cublaslt(form, call, max_tokens, workspace(p.scratch), used)


def _dense_bytes(dtype: str, n: int, k: int) -> int:
    return aligned(n * k * ITEMSIZE[dtype])


# ---- Tactics ----


def supports_packed(form: Form, node: NodeSpec) -> bool:
    """A packed weight, all else dense; gate and up begin at a panel each."""
    weight = node.inputs[1]
    assert weight is not None
    rest = [t.quant or t.dtype for i, t in enumerate(node.inputs) if t is not None and i != 1]
    gated = not form.gated or (node.attrs["kind"] in KINDS and int(weight.shape[0]) % (2 * PANEL) == 0)
    return (
        weight.quant in GPU_BLOCK_TYPES
        and all(kind in GPU_FLOATS for kind in rest)
        and gated
        and no_codes(node)
    )


def _supports_unpacked(form: Form, node: NodeSpec) -> bool:
    return supports_packed(form, node) and node.inputs[2] is None


def _sizes(form: Form, node: NodeSpec) -> tuple[int, int, str, str]:
    """(n, k, dtype of x, block type)."""
    x, weight = node.inputs[:2]
    assert x is not None
    assert weight is not None
    n = int(weight.shape[0]) // (2 if form.gated else 1)
    return n, int(weight.shape[1]), x.dtype, weight.quant


def _packed_bytes(form: Form, node: NodeSpec, max_tokens: int, tiles: PackedTiles) -> int:
    n, k, dtype, _ = _sizes(form, node)
    return normed_bytes(form, k, dtype, max_tokens) + _partial_bytes(form, n, k, max_tokens, tiles)


def _partial_bytes(form: Form, n: int, k: int, max_tokens: int, tiles: PackedTiles) -> int:
    if whole(tiles, n, k):
        return 0
    tile = PANEL * tiles.panels * tiles.block_m * 4 * (2 if form.gated else 1)
    return -(-max_tokens // tiles.block_m) * 2 * tiles.programs * tile


def unpacked_bytes(form: Form, node: NodeSpec, max_tokens: int) -> int:
    n, k, dtype, _ = _sizes(form, node)
    stacked = 2 * n if form.gated else n
    total = normed_bytes(form, k, dtype, max_tokens) + _dense_bytes(dtype, stacked, k)
    return total + (max_tokens * stacked * ITEMSIZE[dtype] if form.gated else 0)


def packed_tactics(op: str, form: Form) -> list[Tactic]:
    """The tactics of ``op`` for packed weights."""

    def tiled(name: str, choose: Callable[[int, int, int, str, str], PackedTiles], **fields: Any) -> Tactic:
        """``choose``: tiles by n, k, tokens, dtype of x, block type."""

        def launches(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
            p = Product(form, call, max_tokens)
            return packed(form, call, choose(p.n, p.k, max_tokens, p.x.dtype, p.weight.quant), max_tokens)

        def nbytes(node: NodeSpec, max_tokens: int) -> int:
            n, k, dtype, quant = _sizes(form, node)
            return _packed_bytes(form, node, max_tokens, choose(n, k, max_tokens, dtype, quant))

        return tactic(name, launches, nbytes, supports_packed, **fields)

    def tactic(
        name: str,
        launches: Launches,
        nbytes: Callable[[NodeSpec, int], int],
        supports: Callable[[Form, NodeSpec], bool],
        precision: str = "bfloat16",
        **fields: Any,
    ) -> Tactic:
        return Tactic(
            name=f"cuda.{op}.{name}",
            op=op,
            device="cuda",
            supports=lambda node: supports(form, node),
            precision=precision,
            weight_layouts={1: LAYOUT},
            workspace=nbytes,
            launches=launches,
            **fields,
        )

    def measured(n: int, k: int, tokens: int, dtype: str, quant: str) -> PackedTiles:
        return packed_tiles(n, k, tokens, form.gated, ITEMSIZE[dtype], quant)

    def invariant(n: int, k: int, tokens: int, dtype: str, quant: str) -> PackedTiles:
        return invariant_packed_tiles(n, ITEMSIZE[dtype], form.gated, quant)

    return [
        *(
            tiled(f"packed{m}", measured, priority=39 if m <= 16 else 30, largest_tokens=m)
            for m in PACKED_STEPS
        ),
        tactic(
            "unpack_cublaslt",
            lambda call, tokens: unpacked(form, call, tokens),
            lambda node, tokens: unpacked_bytes(form, node, tokens),
            _supports_unpacked,
            priority=20,
        ),
        tiled("packed", measured, priority=10),
        tiled("packed_invariant", invariant, priority=0, batch_invariant=True),
    ]
