"""Products of dozens to hundreds of tokens with packed weights, exact inputs: ``hopper_wide.cu``, sm_90."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from pelton.dtypes import BLOCK_TYPES, GGUF_BLOCK_TYPES, GPU_BLOCK_TYPES
from pelton.kernels.gated_activation.cuda import KINDS
from pelton.kernels.gpu_layouts import PANEL, panel_bytes
from pelton.kernels.gpu_types import GPU_TYPES
from pelton.kernels.launch import CallSpec, CudaBuilder, TensorMap, Term, Work, rows
from pelton.kernels.linear.packed import LAYOUT, code_constants
from pelton.kernels.linear.products import Form, Product, normed_workspace
from pelton.kernels.linear.tiles import PROCESSORS
from pelton.kernels.tactic import NodeSpec, Tactic, no_codes

FILE = "linear/hopper_wide.cu"
#: Columns of a unit.
UNIT = 128
#: Values of the constant GATED.
ACTIVATIONS = {"": 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4}
#: Largest numbers of tokens that have a kernel.
WIDE_STEPS = (32, 64, 128, 256)
#: Tokens of a tile of warp groups that are not alone with their block.
_MOST_TOKENS = 128
#: Panels of 16 rows of a warp group.
_GROUP_PANELS = 4
_ROW_BYTES = 128
#: Dynamic shared memory, bytes; besides x, sums and codes: barriers.
_SHARED = 227 << 10
_BESIDES = 16 * 20
#: Bytes of a sum of a warp group: of each thread 16 for eight tokens.
_PART = 128 * 16
_MOST_STAGES = 16
#: Units in a warp's slots: one is read while another comes; more than the most do not help (tiles of 256).
_LEAST_DEPTH, _DEPTH, _DEPTH_OF_256 = 2, 4, 3
#: Types whose scales pass through a table, which is faster in tiles of 256 tokens and with half strips.
_TABLED = ("nf4_g64", "int8_g32", "int8_g64")
#: Clusters of so many blocks that an H200 runs at a time, a block a multiprocessor.
_CLUSTERS = {1: PROCESSORS, 2: 66, 4: 30}


@dataclass(frozen=True)
class WideTiles:
    """How the kernel's blocks share the work."""

    tokens: int
    """Of a tile."""
    row_groups: int
    """Warp groups with rows of their own, each as often as there are splits."""
    splits: int
    """Warp groups that share columns."""
    cluster: int
    """Blocks that share columns."""
    each: int
    """Panels of results of a block."""
    sums: bool = False
    """Whether the sums of a group of columns are scaled, not its weights."""
    half_strip: bool = False
    """Whether two blocks have 64 rows of the weight more, each of half of the tokens."""
    steps: int = 0
    """Of 16 columns that are multiplied while others are decoded; 0: two."""


def wide_tiles(n: int, tokens: int, gated: bool, quant: str) -> WideTiles:
    """For ``n`` results of each of up to ``tokens`` tokens.

    Where there are rows enough, a block has whole sums; else as many rows as make every block's share of the
    work small, and a cluster has their columns.
    """
    strip = _GROUP_PANELS // (2 if gated else 1)  # panels of results of a warp group
    strips = -(-n // (PANEL * strip))
    if tokens > _MOST_TOKENS:
        of_all = _tiles_of_256(strips, strip, quant)
        if of_all is not None and layout_of(of_all, quant).depth >= _LEAST_DEPTH:
            return of_all
    tile = next((t for t in (32, 64) if tokens <= t), _MOST_TOKENS)
    sums = tile <= 64 and GPU_TYPES[quant].group == UNIT
    times = -(-tokens // tile)
    if strips * times >= 3 * PROCESSORS:
        share = -(-strips // (PROCESSORS // times))
        return WideTiles(tile, min(4, share), 1, 1, share * strip, sums)
    fitting = [
        (row_groups / cluster, cluster, row_groups)
        for row_groups in (1, 2, 3, 4)
        for cluster, most in _CLUSTERS.items()
        if -(-strips // row_groups) * times <= most
    ]
    _, cluster, row_groups = min(fitting, default=(0.0, 1, 4))
    slow = quant in GGUF_BLOCK_TYPES
    if tokens == _MOST_TOKENS and _three_of_two(strips) and not slow:
        return WideTiles(tile, 2, 1, 2, strip, half_strip=True)
    # A third group of one strip helps as long as x is small; where decoding takes long, one more.
    splits = {1: 3 if tile <= 64 else 2, 2: 2 if tile <= 64 else 1}.get(row_groups, 1)
    if slow and row_groups * cluster == 1 and tile >= 64:
        splits += 1
    return WideTiles(tile, row_groups, splits, cluster, row_groups * strip, sums)


def _three_of_two(strips: int) -> bool:
    """Whether two clusters of two blocks, each with half of the columns, have three of the strips."""
    return _CLUSTERS[2] < strips and 2 * strips <= 3 * _CLUSTERS[2]


def _tiles_of_256(strips: int, strip: int, quant: str) -> WideTiles | None:
    """A tile of all tokens, so that a weight is decoded once, for so many strips of ``strip`` panels.

    None where these are too few for it. Measured on an H200.
    """
    tokens, halves = 2 * _MOST_TOKENS, _CLUSTERS[2]
    if strips >= PROCESSORS:
        of_two = -(-strips // (PROCESSORS // 2))
        half = of_two % 2 == 1
        return WideTiles(tokens, 2, 1, 1, (of_two + 1 - half) // 2 * strip, half_strip=half)
    if 2 * strips > 3 * halves:
        return WideTiles(tokens, 1, 2, 1, strip)
    if _three_of_two(strips):
        return WideTiles(tokens, 2, 1, 2, strip, half_strip=True)
    steps = 0 if quant == "nf4_g64" else 1
    return WideTiles(tokens, 1, 2, 2, strip, steps=steps) if 2 * strips > halves else None


@dataclass(frozen=True)
class _Layout:
    """How shared memory is used."""

    stages: int
    """Of x's ring."""
    depth: int
    """Units of a warp's codes."""
    one_area: bool
    """Whether these have one place for scales."""
    tabled: bool
    """Whether scales pass through a table."""
    shared: int
    """Bytes in all."""


def layout_of(tiles: WideTiles, quant: str) -> _Layout:
    """Codes have the shared memory that x leaves; parts of sums lie where both were.

    Where two units do not fit, their scales share a place: those of the next are copied when these were read.
    """
    groups, stage = tiles.row_groups * tiles.splits, _ROW_BYTES * tiles.tokens
    unit = panel_bytes(quant, UNIT) - PANEL * BLOCK_TYPES[quant].header
    area, warps = unit - PANEL * UNIT * GPU_TYPES[quant].bits // 8, 4 * groups
    free = _SHARED - _BESIDES
    whole, parts = groups * stage, 0
    if tiles.splits * tiles.cluster > 1:
        of = (groups if tiles.splits > 1 else 0) + (tiles.row_groups if tiles.cluster > 1 else 0)
        whole, parts = 0, of * tiles.tokens // 8 * _PART
    least = 2 * (tiles.splits + 1)
    left = (free - whole - least * stage) // warps  # of a warp
    one_area = groups < 4 and left < _LEAST_DEPTH * unit
    table = 0
    if quant in _TABLED and (tiles.half_strip or tiles.tokens > _MOST_TOKENS):
        table = 8 * PANEL * (UNIT // GPU_TYPES[quant].group)
    if left < _LEAST_DEPTH * unit + table:
        table = 0
    if one_area:
        depth, used = min(_LEAST_DEPTH, (left - area) // (unit - area)), _LEAST_DEPTH * (unit - area) + area
    else:
        depth = min(_DEPTH_OF_256 if tiles.tokens > _MOST_TOKENS else _DEPTH, (left - table) // unit)
        used = depth * unit + table
    stages = max(least, min(_MOST_STAGES, (free - whole - warps * used) // stage) // 2 * 2)
    shared = max(whole + stages * stage + warps * used, parts) + _BESIDES
    return _Layout(stages, depth, one_area, table > 0, shared)


def wide(form: Form, call: CallSpec, tiles: WideTiles, max_tokens: int) -> tuple[Work, ...]:
    """A norm into the workspace, where there is one, and the product."""
    p = Product(form, call, max_tokens)
    normed = form.norm is not None
    x_map = TensorMap(
        dtype=p.x.dtype,
        shape=(p.k, max_tokens),
        strides=(2 * (p.k if normed else p.x.strides[0]),),
        box=(_ROW_BYTES // 2, tiles.tokens),
    )
    b = CudaBuilder(call, FILE, "wide").input(1)
    b = b.workspace_map(0, x_map) if normed else b.tensor_map(0, x_map)
    bias = call.inputs[2] is not None
    for index in (2 if bias else None, form.residual):
        b = b.nothing() if index is None else b.input(index)
    b.output().dim(p.x.shape[0])
    groups = tiles.row_groups * tiles.splits
    layout = layout_of(tiles, p.weight.quant)
    assert layout.depth >= _LEAST_DEPTH, f"{tiles} does not fit"
    # As the kernel's UNEVEN.
    uneven = (groups == 4 and (tiles.sums or tiles.tokens > 64)) or tiles.tokens > 128
    blocks = -(-p.n // (PANEL * tiles.each)) * tiles.cluster
    if tiles.half_strip:
        strip = _GROUP_PANELS // (2 if form.gated else 1)
        blocks = -(-p.n // (PANEL * (2 * tiles.each + strip))) * 2 * tiles.cluster
    return (
        *p.norm(),
        b.launch(
            (Term(times=blocks),),
            (rows(p.x, tiles.tokens),),
            constants={
                "RESULTS": p.n,
                "INNER": p.k,
                "TOKENS": tiles.tokens,
                "ROW_GROUPS": tiles.row_groups,
                "SPLITS": tiles.splits,
                "CLUSTER": tiles.cluster,
                "HALF_STRIP": int(tiles.half_strip),
                "EACH": tiles.each,
                "STAGES": layout.stages,
                "DEPTH": layout.depth,
                "STEPS": tiles.steps or 2,
                "SUMS": int(tiles.sums),
                "TABLED": int(layout.tabled),
                "ONE_AREA": int(layout.one_area),
                "BIAS": int(bias),
                "RESIDUAL": int(form.residual is not None),
                "R_ROW": 0 if form.residual is None else call.input(form.residual).strides[0],
                "GATED": ACTIVATIONS[p.kind],
                **code_constants(p.weight.quant),
            },
            threads=128 * groups + (128 if uneven else 32),
            shared=layout.shared,
            suffix="a",
            dependent=True,
        ),
    )


def supports_wide(form: Form, node: NodeSpec) -> bool:
    """bfloat16 that no static scale rounds, whole units of the weight, vectors in float32 as engines have."""
    x, weight, *_ = node.inputs
    assert x is not None
    assert weight is not None
    vectors = [node.inputs[i] for i in (2, form.norm) if i is not None]
    rows_of = [x] + ([] if form.residual is None else [node.inputs[form.residual]])
    return (
        weight.quant in GPU_BLOCK_TYPES
        and int(weight.shape[0]) // PANEL * panel_bytes(weight.quant, int(weight.shape[1])) < 1 << 32
        and all(t is None or (t.quant or t.dtype) == "float32" for t in vectors)
        and all(t is not None and t.dtype == "bfloat16" for t in rows_of)
        and int(weight.shape[0]) % (PANEL * (2 if form.gated else 1)) == 0
        and int(weight.shape[1]) % UNIT == 0
        and (not form.gated or node.attrs["kind"] in KINDS)
        and no_codes(node)
    )


def wide_tactics(op: str, form: Form) -> list[Tactic]:
    """The tactics of ``op``."""

    def launches(call: CallSpec, max_tokens: int, largest: int) -> tuple[Work, ...]:
        p = Product(form, call, max_tokens)
        return wide(form, call, wide_tiles(p.n, largest, form.gated, p.weight.quant), max_tokens)

    return [
        Tactic(
            name=f"cuda.{op}.packed_wide{m}",
            op=op,
            device="cuda",
            supports=lambda node: supports_wide(form, node),
            priority=43 - i,
            precision="bfloat16",
            sm=90,
            largest_tokens=m,
            weight_layouts={1: LAYOUT},
            workspace=normed_workspace(form),
            launches=partial(launches, largest=m),
        )
        for i, m in enumerate(WIDE_STEPS)
    ]
