"""Products of a few tokens by tensor copies and tensor cores, for sm_90 (``hopper_rows.cu``)."""

from __future__ import annotations

from dataclasses import dataclass

from pelton.kernels.launch import CallSpec, CudaBuilder, LaunchSpec, TensorMap, rows
from pelton.kernels.linear.tiles import PROCESSORS, HopperTiles

FILE = "linear/hopper_rows.cu"
#: Columns and bytes of a row of a box.
COLUMNS, ROW_BYTES = 64, 128
#: Dynamic shared memory, bytes. No two blocks fit into a multiprocessor: else the next kernel, which begins
#: early, would put two where this one has none, and they would be the last to end. With matrices of up to
#: ``_SMALL`` elements, such as stand around attention, one of its blocks fits too; others' rings are deep.
SHARED, DEEP = 114 << 10, 200 << 10
_SMALL = 1 << 25
#: Values of the constant GATED.
_ACTIVATIONS = {"": 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4}
_MOST_STAGES = 12


@dataclass(frozen=True, kw_only=True)
class HopperProduct:
    """A product as the kernel is told of it."""

    n: int
    k: int
    kind: str
    """Activation of the gate; empty: not gated."""
    dtype: str
    max_tokens: int
    residual: int | None
    norm: int | None
    """Inputs by index."""
    bias: bool


@dataclass(frozen=True)
class _Plan:
    """How the kernel's blocks and their shared memory are laid out."""

    workers: int
    """Blocks with work, of which each has ``each`` tiles of rows."""
    each: int
    stages: int
    shared: int


def plan(p: HopperProduct, tiles: HopperTiles) -> _Plan:
    """As many tiles in flight as fit into the shared memory that such a product has."""
    shared = SHARED if p.n * p.k * (2 if p.kind else 1) <= _SMALL else DEEP
    n_tiles = -(-p.n // out_rows(p, tiles))
    workers = -(-n_tiles // -(-n_tiles // PROCESSORS))
    each = -(-n_tiles // workers)
    stage = tiles.boxes * (tiles.rows + tiles.tokens) * ROW_BYTES
    columns = -(-p.k // (COLUMNS * tiles.boxes)) * COLUMNS * tiles.boxes
    sums = tiles.splits * tiles.rows * tiles.tokens * 4
    # The norm's weight, sums where the ring goes on, sums of squares, barriers, up to a multiple of 1024.
    besides = 2 * columns if p.norm is not None else 0
    besides += (sums if each > 1 else 0) + tiles.splits * tiles.tokens * 4 + 16 * _MOST_STAGES + 1024
    stages = min(_MOST_STAGES, (shared - besides) // stage)
    assert stages >= 2, f"{tiles} does not fit"
    assert each > 1 or sums <= stages * stage, "the sums of a single tile lie in the ring"
    return _Plan(workers, each, stages, shared)


def out_rows(p: HopperProduct, tiles: HopperTiles) -> int:
    """Results of a tile."""
    return tiles.rows // 2 if p.kind else tiles.rows


def product(call: CallSpec, p: HopperProduct, tiles: HopperTiles) -> LaunchSpec:
    """The launch for a step of at most ``p.max_tokens`` tokens."""
    x = call.input(0)
    layout = plan(p, tiles)
    w_map = TensorMap(
        dtype=p.dtype,
        shape=(p.k, 2 * p.n if p.kind else p.n),
        strides=(2 * p.k,),
        box=(COLUMNS, out_rows(p, tiles)),
    )
    x_map = TensorMap(
        dtype=p.dtype,
        shape=(p.k, p.max_tokens),
        strides=(2 * x.strides[0],),
        box=(COLUMNS, tiles.tokens),
    )
    b = CudaBuilder(call, FILE, "product").tensor_map(1, w_map).tensor_map(0, x_map)
    for index in (p.norm, 2 if p.bias else None, p.residual):
        b = b.nothing() if index is None else b.input(index)
    b.output().dim(x.shape[0]).number(float(call.attrs.get("eps", 0.0)))
    return b.launch(
        (rows(x, tiles.tokens, layout.workers),),
        constants={
            "RESULTS": p.n,
            "INNER": p.k,
            "TOKENS": tiles.tokens,
            "ROWS": tiles.rows,
            "BOXES": tiles.boxes,
            "STAGES": layout.stages,
            "WARPS": tiles.warps,
            "SPLITS": tiles.splits,
            "WORKERS": layout.workers,
            "GATED": _ACTIVATIONS[p.kind],
            "NORM": int(p.norm is not None),
            "BIAS": int(p.bias),
            "RESIDUAL": int(p.residual is not None),
            "R_ROW": 0 if p.residual is None else call.input(p.residual).strides[0],
            "HALF": int(p.dtype == "float16"),
        },
        threads=32 * (tiles.warps + 1),
        shared=layout.shared,
        suffix="a",
        dependent=True,
    )
