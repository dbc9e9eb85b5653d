"""Products of a few tokens by tensor copies and tensor cores, for sm_90 (``hopper_rows.cuh``)."""

from __future__ import annotations

from dataclasses import dataclass

from pelton.dtypes import ITEMSIZE
from pelton.ir import group_blocks
from pelton.kernels.gpu_rows8 import scales_at
from pelton.kernels.launch import CallSpec, CudaBuilder, LaunchSpec, TensorMap, result_code, rows
from pelton.kernels.linear.tiles import PROCESSORS, HopperTiles

FILE, FILE_8 = "linear/hopper_rows.cu", "linear/hopper_rows8.cu"
#: Bytes of a row of a box; columns of a box of x.
ROW_BYTES, X_COLUMNS = 128, 64
#: Dynamic shared memory, bytes. No two blocks fit into a multiprocessor: else the next kernel, which begins
#: early, would put two where this one has none, and they would be the last to end. With matrices of up to
#: ``_SMALL`` elements, such as stand around attention, one of its blocks fits too; others' rings are deep.
SHARED, DEEP = 114 << 10, 200 << 10
_SMALL = 1 << 25
#: Values of the constant GATED.
_ACTIVATIONS = {"": 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4}
_MOST_STAGES = 12
_MOST_STAGES_8 = 32
#: Values of the constant CODE.
_CODES = {"fp8_row": 1, "fp8_g128": 1, "int8_row": 2}


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
    quant: str = ""
    """Type of a weight of 8-bit codes (layout ``rows8``); empty: elements of ``dtype``."""
    x_scale: float = 0.0
    """Not 0: x is codes of this static scale, of the weight's type."""
    y_scale: float = 0.0
    """Not 0: the result is codes of this static scale."""

    @property
    def columns(self) -> int:
        """Of a box of the weight."""
        return ROW_BYTES if self.quant else X_COLUMNS

    @property
    def x_columns(self) -> int:
        """Of a box of x."""
        return ROW_BYTES if self.x_scale else X_COLUMNS


@dataclass(frozen=True)
class _Plan:
    """How the kernel's blocks and their shared memory are laid out."""

    workers: int
    """Blocks with work, of which each has ``each`` tiles of rows."""
    each: int
    stages: int
    shared: int


def plan(p: HopperProduct, tiles: HopperTiles) -> _Plan | None:
    """As many tiles in flight as fit into the shared memory that such a product has; None: too few."""
    n_tiles = -(-p.n // out_rows(p, tiles))
    workers = -(-n_tiles // -(-n_tiles // PROCESSORS))
    each = -(-n_tiles // workers)
    stage = tiles.boxes * (tiles.rows + p.columns // p.x_columns * tiles.tokens) * ROW_BYTES
    columns = -(-p.k // (p.columns * tiles.boxes)) * p.columns * tiles.boxes
    sums = tiles.splits * tiles.rows * tiles.tokens * 4
    most = _MOST_STAGES_8 if p.quant else _MOST_STAGES
    # The norm's weight, rows' scales, sums where the ring goes on, sums of squares, barriers, up to a
    # multiple of 1024.
    besides = (2 * columns if p.norm is not None else 0) + (4 * tiles.rows if p.quant else 0)
    besides += (sums if each > 1 else 0) + tiles.splits * tiles.tokens * 4 + 24 * most + 1024
    besides += 256 * tiles.warps + 16 if p.quant and tiles.tokens == 8 else 0
    # With 8-bit codes, as many that no warp is more than a lap ahead of another.
    least = tiles.splits // tiles.boxes if p.quant else 2
    if each == 1:  # the sums lie in the ring
        least = max(least, -(-sums // stage))
    small = p.n * p.k * (2 if p.kind else 1) <= _SMALL
    for shared in (SHARED, DEEP) if small else (DEEP,):
        stages = min(most, (shared - besides) // stage)
        if stages >= least:
            return _Plan(workers, each, stages, shared)
    return None


def out_rows(p: HopperProduct, tiles: HopperTiles) -> int:
    """Results of a tile."""
    return tiles.rows // 2 if p.kind else tiles.rows


def product(call: CallSpec, p: HopperProduct, tiles: HopperTiles) -> LaunchSpec:
    """The launch for a step of at most ``p.max_tokens`` tokens."""
    x = call.input(0)
    layout = plan(p, tiles)
    assert layout is not None, f"{tiles} does not fit"
    stacked = 2 * p.n if p.kind else p.n
    x_row = ITEMSIZE[x.dtype] * x.strides[0]
    constants: dict[str, int] = {}
    if p.quant:
        # The third dimension: boxes, of which one copy takes several.
        w_boxes = 1 if p.kind else tiles.boxes
        w_map = TensorMap(
            dtype="uint8",
            shape=(p.columns, stacked, p.k // p.columns),
            strides=(p.k, p.columns),
            box=(p.columns, out_rows(p, tiles), w_boxes),
        )
        x_map = TensorMap(
            dtype="uint8" if p.x_scale else p.dtype,
            shape=(p.x_columns, p.max_tokens, p.k // p.x_columns),
            strides=(x_row, ROW_BYTES),
            box=(p.x_columns, tiles.tokens, p.columns // p.x_columns * tiles.boxes),
        )
        b = CudaBuilder(call, FILE_8, "product").tensor_map(1, w_map).input(1).tensor_map(0, x_map)
        constants = {"CODE": _CODES[p.quant], "SCALES": scales_at((stacked, p.k))}
        constants["GROUPED"] = int(group_blocks.group_of(p.quant) > 0)
        constants |= {"X_CODES": int(p.x_scale > 0), "RESULT_CODE": result_code(call)}
    else:
        w_map = TensorMap(
            dtype=p.dtype, shape=(p.k, stacked), strides=(2 * p.k,), box=(X_COLUMNS, out_rows(p, tiles))
        )
        x_map = TensorMap(
            dtype=p.dtype, shape=(p.k, p.max_tokens), strides=(x_row,), box=(X_COLUMNS, tiles.tokens)
        )
        b = CudaBuilder(call, FILE, "product").tensor_map(1, w_map).tensor_map(0, x_map)
    for index in (p.norm, 2 if p.bias else None, p.residual):
        b = b.nothing() if index is None else b.input(index)
    b.output().dim(x.shape[0]).number(float(call.attrs.get("eps", 0.0)))
    if p.quant:
        b.number(p.x_scale).number(p.y_scale)
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
            **constants,
        },
        threads=32 * (tiles.warps + 2),
        shared=layout.shared,
        suffix="a",
        dependent=True,
    )
