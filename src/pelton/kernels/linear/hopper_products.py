"""Products of codes with codes by tensor copies and warp-group products on sm_90 (``hopper_products.cu``)."""

from __future__ import annotations

from dataclasses import dataclass

from pelton.dtypes import ITEMSIZE
from pelton.kernels.launch import (
    CallSpec,
    CudaBuilder,
    LaunchSpec,
    TensorMap,
    Term,
    Work,
    result_code,
    rows,
)
from pelton.kernels.linear.packed import X_CODES
from pelton.kernels.linear.products import (
    Form,
    Launches,
    Product,
    aligned,
    gemm,
    normed_workspace,
    supports_dense,
)
from pelton.kernels.linear.rows8 import LAYOUT, supports_rows8, unpacked, unpacked_bytes
from pelton.kernels.linear.tiles import PROCESSORS
from pelton.kernels.tactic import NodeSpec, Tactic, static_codes

FILE = "linear/hopper_products.cu"
QUANTIZE = "linear/hopper_quantize.cu"
#: Bytes of a row of a box.
ROW_BYTES = 128
#: Values of the constants CODE and GATED.
CODES = {"fp8_row": 1, "int8_row": 2}
_ACTIVATIONS = {"": 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4}
_SHARED, _MOST_STAGES = 226 << 10, 16
#: Besides the ring and vectors of a tile: barriers, up to the first multiple of 1024 bytes.
_BESIDES = 1024 + 24 * _MOST_STAGES + 16
#: Bytes of the weight that a block has asked for at most and not got yet, where x is one tile.
_ON_THEIR_WAY = 96 << 10
#: Sums of a thread from which on, where two warp groups multiply, the copying one gives registers up.
_UNEVEN = 128


@dataclass(frozen=True)
class ProductTiles:
    """How ``hopper_products.cu`` takes a product (its constants of the same names say more).

    Warp groups along rows of x and of the weight; of each, ``m_tiles`` of 64 rows by ``columns`` rows of the
    weight; blocks that share columns and those that share rows of the weight; units between additions in
    float32, 0: none; tiles of x in a group, 0: no groups.
    """

    wg_m: int
    wg_n: int
    m_tiles: int
    columns: int
    split: int = 1
    share: int = 1
    promote: int = 0
    group: int = 0

    @property
    def x_rows(self) -> int:
        return 64 * self.wg_m * self.m_tiles


def code_rows(max_tokens: int, exact: bool) -> int:
    """Rows of codes of so many tokens: of exact ones two each, in eights of high and of low parts."""
    return -(-max_tokens // 8) * 16 if exact else max_tokens


def code_bytes(k: int, max_tokens: int, exact: bool) -> tuple[int, int]:
    """(Bytes of codes and scales in the workspace, where the scales begin)."""
    codes = aligned(code_rows(max_tokens, exact) * k)
    return codes + aligned(4 * max_tokens), codes


def quantised(p: Product, exact: bool) -> tuple[LaunchSpec, int]:
    """x, normed where the form says so, as codes at the workspace's beginning; where their scales are."""
    _, scales = code_bytes(p.k, p.max_tokens, exact)
    return quantise_launch(p, scales, exact=exact), scales


def quantise_launch(
    p: Product, scales: int, *, exact: bool = False, group: int = 0, scale_row: int = 0
) -> LaunchSpec:
    """Codes at the workspace's beginning, their scales from byte ``scales`` on.

    ``group``: columns of a row that have a scale (0: all), those of the next ``scale_row`` floats behind.
    """
    b = CudaBuilder(p.call, QUANTIZE, "quantize_rows").input(0)
    b = b.nothing() if p.form.norm is None else b.input(p.form.norm)
    b.workspace().workspace(scales).number(float(p.call.attrs.get("eps", 0.0)))
    b.number(p.x_scale)
    vectors = p.k // 8
    threads = 32 * -(-vectors // (32 * -(-vectors // 256)))  # several rows beside each other
    return b.launch(
        (rows(p.x),),
        constants={
            "CODE": {"fp8": 1, "int8": 2}[X_CODES[p.weight.quant]],
            "INNER": p.k,
            "X_ROW": p.x.strides[0],
            "EXACT": int(exact),
            "NORM": int(p.form.norm is not None),
            "HALF": int(p.x.dtype == "float16"),
            "THREADS": threads,
            "GROUP": group,
            "X_SCALES": scale_row,
        },
        threads=threads,
        shared=0,
        dependent=True,
    )


def weight_map(p: Product, tiles: ProductTiles, dtype: str) -> TensorMap:
    """Boxes of 128 bytes of the rows of a tile that a block copies; gated: eights of gate and up in turn."""
    item = ITEMSIZE[dtype]
    unit, w_row, block_rows = ROW_BYTES // item, p.k * item, tiles.columns * tiles.wg_n
    if p.form.gated:
        return TensorMap(
            dtype=dtype,
            shape=(p.k, 8, 2, p.n // 8),
            strides=(w_row, p.n * w_row, 8 * w_row),
            box=(unit, 8, 2, block_rows // 16 // tiles.share),
        )
    return TensorMap(dtype=dtype, shape=(p.k, p.n), strides=(w_row,), box=(unit, block_rows // tiles.share))


def products(
    form: Form, call: CallSpec, tiles: ProductTiles, max_tokens: int, *, exact: bool = False
) -> tuple[Work, ...]:
    """x as codes, where it is none yet, of a dense weight the norm, where there is one; and the product.

    ``exact``: x as two codes a value.
    """
    p = Product(form, call, max_tokens)
    codes = bool(p.weight.quant)
    rows_of_x = code_rows(max_tokens, exact)
    x_box = min(tiles.x_rows, -(-rows_of_x // 8) * 8)
    item = 1 if codes else ITEMSIZE[p.weight.dtype]
    dtype, unit = "uint8" if codes else p.weight.dtype, ROW_BYTES // item
    x_row = p.k if codes or form.norm is not None else p.x.strides[0]
    x_map = TensorMap(dtype=dtype, shape=(p.k, rows_of_x), strides=(x_row * item,), box=(unit, x_box))
    block_rows = tiles.columns * tiles.wg_n
    tile = block_rows // (2 if form.gated else 1)
    assert not codes or p.k % ROW_BYTES == 0, "no padding between rows of the weight"
    before: tuple[Work, ...]
    b = CudaBuilder(call, FILE, "products").tensor_map(1, weight_map(p, tiles, dtype))
    if p.coded:
        before = ()
        b.tensor_map(0, x_map).input(1).nothing()
    elif codes:
        quantise, scales = quantised(p, exact)
        before = (quantise,)
        b.workspace_map(0, x_map).input(1).workspace(scales)
    else:
        before = p.norm()
        b = b.tensor_map(0, x_map) if form.norm is None else b.workspace_map(0, x_map)
        b.nothing().nothing()
    bias = call.inputs[2] is not None
    for index in (2 if bias else None, form.residual):
        b = b.nothing() if index is None else b.input(index)
    b.output().dim(p.x.shape[0]).number(p.x_scale).number(p.y_scale)
    cluster = tiles.split * tiles.share
    items = -(-p.n // tile) * -(-rows_of_x // (tiles.x_rows * tiles.share))
    most = items if tiles.split > 1 else PROCESSORS // cluster  # blocks stay, and take as many items each
    clusters = -(-items // -(-items // most))
    besides = _BESIDES
    if codes or bias:
        besides += 8 * tiles.columns * tiles.wg_m * tiles.wg_n
    if tiles.split > 1:  # what a thread is sent: eight sums of every other sixteen
        besides += 4096 * tiles.wg_m * tiles.wg_n * -(-tiles.m_tiles * tiles.columns // 32)
    # Rows of x that are not copied need no space, as long as something lies there.
    x_space = tiles.x_rows if x_box + block_rows < tiles.x_rows else x_box
    stage = (x_space + block_rows) * ROW_BYTES
    stages = min(_MOST_STAGES, (_SHARED - besides) // stage)
    assert stages >= 2, f"{tiles} does not fit"
    window = max(1, min(stages, _ON_THEIR_WAY // (block_rows * ROW_BYTES)))
    sums = (2 if tiles.promote else 1) * tiles.m_tiles * tiles.columns // 2
    uneven = tiles.wg_m * tiles.wg_n == 2 and sums >= _UNEVEN
    launch = b.launch(
        (Term(times=clusters * cluster),),
        constants={
            "CODE": CODES.get(p.weight.quant, 0),
            "HALF": int(p.x.dtype == "float16"),
            "RESULTS": p.n,
            "INNER": p.k,
            "WG_M": tiles.wg_m,
            "WG_N": tiles.wg_n,
            "M_TILES": tiles.m_tiles,
            "COLUMNS": tiles.columns,
            "SIXTEENS": tiles.columns // 16,
            "X_BOX": x_box,
            "STAGES": stages,
            "WINDOW": window if rows_of_x <= tiles.x_rows else 0,
            "SPLIT": tiles.split,
            "SHARE": tiles.share,
            "PROMOTE": tiles.promote,
            "GROUP": tiles.group // tiles.share,
            "EXACT": int(exact),
            "STATIC": int(p.x_scale > 0 and not exact),
            "RESULT_CODE": result_code(call),
            "GATED": _ACTIVATIONS[p.kind],
            "BIAS": int(bias),
            "RESIDUAL": int(form.residual is not None),
            "R_ROW": 0 if form.residual is None else call.input(form.residual).strides[0],
        },
        threads=128 * tiles.wg_m * tiles.wg_n + (128 if uneven else 64),
        shared=stages * stage + besides,
        suffix="a",
        # Beside cuBLASLt's products, one that begins early is in their way.
        dependent=codes or max_tokens <= DENSE_STEPS[-1],
    )
    return *before, launch


# ---- Tiles ----

#: Rows of codes, one a token or two, of the largest steps that have tiles of their own.
CODE_STEPS, EXACT_STEPS = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 0), (64, 128, 256, 512)
#: The same of weights of 16 bits: beyond, cuBLASLt is as fast. Gated, it needs a pass more: any number (0).
DENSE_STEPS, GATED_STEPS = (32, 64, 128), (32, 64, 128, 256, 512, 640, 768, 1024, 0)
#: Tokens of the steps that tiles of many rows are chosen for, by the largest step; 2048 are the usual chunk.
_MANY = {640: (640,), 768: (768,), 1024: (1024,), 0: (1536, 2048, 2048, 8192)}


def product_tiles(n: int, k: int, x_rows: int, gated: bool, quant: str, *, exact: bool) -> ProductTiles:
    """For ``n`` results of so many rows of x, of ``k`` bytes each.

    As many blocks as there are multiprocessors: where rows of the weight are too few for tall tiles, blocks
    share columns. Exact e4m3 is added up in float32 every 512 columns.
    """
    wg_m, wg_n = (1, 2) if x_rows <= 64 else (3, 1) if 128 < x_rows <= 192 and not exact else (2, 1)
    promote = 4 if exact and quant == "fp8_row" else 0
    most = 160 if wg_m == 3 else 192 if promote and wg_n == 1 else 256 // wg_n  # sums fit into registers
    rows_of_all = (2 * n if gated else n) * -(
        -x_rows // (64 * wg_m)
    )  # as if tiles of x lay behind each other
    # Clusters of four do not fill an H200, and those of two cost some microseconds.
    narrow = rows_of_all < (48 if k <= 8192 else 90) * PROCESSORS
    split = 2 if narrow and 2 * rows_of_all <= most * wg_n * PROCESSORS and k >= 8 * ROW_BYTES else 1
    if split == 2 and x_rows <= 64 and 2 * rows_of_all <= (192 if promote else 256) * PROCESSORS:
        wg_n, most = 1, 192 if promote else 256  # x is read once from shared memory
    each = -(-rows_of_all * split // (most * wg_n * PROCESSORS))  # of a block
    columns = min(most, -(-rows_of_all * split // (each * PROCESSORS * 16 * wg_n)) * 16)
    pairs = x_rows > 192 and -(-x_rows // 128) % 2 == 0
    shared = pairs and each > 1 and columns % (32 if gated else 16) == 0
    return ProductTiles(wg_m, wg_n, 1, columns, split, 2 if shared else 1, promote)


def many_tiles(stacked: int, largest: int) -> ProductTiles:
    """For steps of hundreds to thousands of tokens, up to ``largest``: 128 rows by some 256 of ``stacked``.

    By how many of them multiprocessors take one after another, and that narrow ones read more. Clusters of
    two save 8 % where power is the limit (measured).
    """

    def cost(columns: int, share: int) -> float:
        items = [-(-stacked // columns) * -(-tokens // (128 * share)) for tokens in _MANY[largest]]
        rounds = (-(-i * share // PROCESSORS) for i in items)
        each = ((columns + 16) * r / tokens for r, tokens in zip(rounds, _MANY[largest], strict=True))
        return sum(each) * (1.0 if share == 2 else 1.08)

    tiles = ((256, 2), (224, 2), (192, 2), (256, 1), (240, 1), (224, 1), (208, 1), (192, 1))
    columns, share = min(tiles, key=lambda c: cost(*c))
    return ProductTiles(2, 1, 1, columns, share=share, group=16)


# ---- Tactics ----


def reached(p: Product) -> bool:
    """Whether rows lie as tensor copies want them, and the residual's in whole 16 bytes."""
    residual = None if p.form.residual is None else p.call.input(p.form.residual)
    lie_so = p.copies() and (residual is None or residual.strides[0] % 8 == 0)
    assert lie_so or not (p.coded or p.y_scale), "codes are rows as a kernel has left them"
    return lie_so


def supports_codes(form: Form, node: NodeSpec) -> bool:
    """Rows of the weight in eights, besides what the layout asks for."""
    weight = node.inputs[1]
    assert weight is not None
    eights = int(weight.shape[0]) % (16 if form.gated else 8) == 0
    return weight.quant in CODES and supports_rows8(form, node) and eights


def product_tactics(op: str, form: Form) -> list[Tactic]:
    """The tactics of ``op``."""

    def made(name: str, codes: str, largest: int, priority: int) -> Tactic:
        """``codes``: type of the input's codes; "": exact."""

        def supports(node: NodeSpec) -> bool:
            weight = node.inputs[1]
            assert weight is not None
            if codes:
                wanted = X_CODES.get(weight.quant) == node.activations == static_codes(node, codes) == codes
            else:
                wanted = not static_codes(node)
            return wanted and supports_codes(form, node)

        def launches(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
            p = Product(form, call, max_tokens)
            if not reached(p):
                return unpacked(form, call, max_tokens)
            if codes and largest in _MANY:
                tiles = many_tiles(int(p.weight.shape[0]), largest)
            else:
                x_rows = code_rows(max_tokens, not codes)
                tiles = product_tiles(p.n, p.k, x_rows, form.gated, p.weight.quant, exact=not codes)
            return products(form, call, tiles, max_tokens, exact=not codes)

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
            priority=priority,
            precision=codes or "bfloat16",
            sm=90,
            largest_tokens=largest,
            weight_layouts={1: LAYOUT},
            workspace=nbytes,
            launches=launches,
        )

    return [
        *(made(f"rows8_exact{m // 2}", "", m // 2, 36 - i) for i, m in enumerate(EXACT_STEPS)),
        *(
            made(f"rows8_codes{m or ''}.{code}", code, m, 47 - i)
            for i, m in enumerate(CODE_STEPS)
            for code in ("int8", "fp8")
        ),
    ]


def supports_dense_products(form: Form, node: NodeSpec) -> bool:
    """x, weight and residual of one type of 16 bits; rows that tensor copies take."""
    x, weight, bias = node.inputs[:3]
    assert x is not None
    assert weight is not None
    residual = x if form.residual is None else node.inputs[form.residual]
    return (
        supports_dense(form, node)
        and residual is not None
        and x.dtype in ("bfloat16", "float16")
        and x.dtype == residual.dtype == (weight.quant or weight.dtype)
        and (bias is None or bias.dtype == "float32")
        and int(weight.shape[1]) % 8 == 0
        and int(weight.shape[0]) % (16 if form.gated else 8) == 0
    )


def dense_tactics(op: str, form: Form) -> list[Tactic]:
    """The tactics of ``op`` for weights of 16 bits, where cuBLASLt leaves something to gain."""

    def launches_up_to(largest: int) -> Launches:
        def launches(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
            p = Product(form, call, max_tokens)
            if not reached(p):
                return gemm(form, call, max_tokens)
            if largest in _MANY:
                tiles = many_tiles(2 * p.n, largest)
            else:
                tiles = product_tiles(p.n, 2 * p.k, max_tokens, form.gated, "", exact=False)
            return products(form, call, tiles, max_tokens)

        return launches

    return [
        Tactic(
            name=f"cuda.{op}.hopper_tiles{m or ''}",
            op=op,
            device="cuda",
            supports=lambda node: supports_dense_products(form, node),
            priority=29 - i,
            precision="bfloat16",
            sm=90,
            largest_tokens=m,
            workspace=normed_workspace(form),
            launches=launches_up_to(m),
        )
        for i, m in enumerate(GATED_STEPS if form.gated else DENSE_STEPS)
    ]
