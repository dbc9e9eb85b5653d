"""Products of dozens to hundreds of tokens with packed weights, for sm_90 (``hopper_packed.cu``)."""

from __future__ import annotations

from dataclasses import dataclass

from pelton.kernels.launch import CallSpec, CudaBuilder, TensorMap, Term, Work, rows
from pelton.kernels.linear.packed import LAYOUT, X_CODES, quantised_bytes, quantised_rows, type_constants
from pelton.kernels.linear.packed_few import UNIT, code_constants, supports_few
from pelton.kernels.linear.products import Form, Product, normed_bytes
from pelton.kernels.linear.tiles import PROCESSORS
from pelton.kernels.tactic import NodeSpec, Tactic

FILE = "linear/hopper_packed.cu"
#: Largest numbers of tokens that have a kernel.
MANY_STEPS = (32, 64, 128)
#: The same of products of codes: beyond, blocks share too many tiles.
CODES_STEP = 256
_ROW_BYTES = 128
#: Besides the ring: barriers, flags, up to the first multiple of 1024 bytes.
_BESIDES = 1024 + 16 * 8 + 64
_MOST_STAGES = 8
_SHARED = 225 << 10


@dataclass(frozen=True)
class ManyTiles:
    """Tokens of a tile; warp groups, of 64 rows (gated: of each half) each."""

    tokens: int
    groups: int


def many_tiles(n: int, k: int, tokens: int, gated: bool, quant: str, *, codes: bool = False) -> ManyTiles:
    """For ``n`` results of each of up to ``tokens`` tokens."""
    if codes:
        return ManyTiles(64 if tokens <= 64 or gated else 128, 2)
    return ManyTiles(next((t for t in (32, 64) if tokens <= t), 128), 2)


def partial_bytes(tiles: ManyTiles, max_tokens: int, gated: bool) -> int:
    """Workspace of the tiles that blocks share."""
    block = 2 * tiles.groups * 64 * tiles.tokens * 4 * (2 if gated else 1)
    return -(-max_tokens // tiles.tokens) * PROCESSORS * block


def many(
    form: Form, call: CallSpec, tiles: ManyTiles, max_tokens: int, *, codes: bool = False
) -> tuple[Work, ...]:
    """A norm into the workspace, where there is one, and the product; ``codes``: x as 8-bit codes there."""
    p = Product(form, call, max_tokens)
    quant = p.weight.quant
    kind = type_constants(quant)
    halves = 2 if form.gated else 1
    item = 1 if codes else 2
    row = (p.k if codes or form.norm is not None else p.x.strides[0]) * item
    x_map = TensorMap(
        dtype="uint8" if codes else p.x.dtype,
        shape=(p.k, max_tokens),
        strides=(row,),
        box=(_ROW_BYTES // item, tiles.tokens),
    )
    before: tuple[Work, ...] = p.norm()
    b = CudaBuilder(call, FILE, "packed").input(1)
    if codes:
        rows_launch, scales = quantised_rows(p)
        before = (rows_launch,)
        b.workspace_map(0, x_map).workspace(scales)
    elif form.norm is not None:
        b.workspace_map(0, x_map).nothing()
    else:
        b.tensor_map(0, x_map).nothing()
    bias = call.inputs[2] is not None
    for index in (2 if bias else None, form.residual):
        b = b.nothing() if index is None else b.input(index)
    b.output().workspace(p.scratch).counters().dim(p.x.shape[0])
    eight = kind["CODE"] in ("e4m3", "s8", "u8")
    group = int(kind["GROUP"])
    area = 16 * ((2 if kind["SCALE"] == "float16" else 4) + int(kind["ZERO"]))
    panel = (2048 if eight else 1024) + (UNIT // group * area if group else 0)
    stage = (1 if codes else 2) * tiles.tokens * _ROW_BYTES + halves * tiles.groups * 4 * panel
    stage = -(-stage // 1024) * 1024
    stages = min(_MOST_STAGES, (_SHARED - _BESIDES) // stage)
    # Every block has work: those that share a tile are counted by their numbers.
    units = -(-p.n // (64 * tiles.groups)) * (p.k // UNIT)
    uneven = (2 if codes else 1) * halves * tiles.tokens // 2 > 64
    return (
        *before,
        b.launch(
            (Term(times=min(PROCESSORS, units)),),
            (rows(p.x, tiles.tokens),),
            constants={
                "RESULTS": p.n,
                "INNER": p.k,
                "TOKENS": tiles.tokens,
                "GROUPS": tiles.groups,
                "STAGES": stages,
                "X_CODES": {"s8": 1, "e4m3": 2}[str(kind["CODE"])] if codes else 0,
                "BIAS": int(bias),
                "RESIDUAL": int(form.residual is not None),
                "R_ROW": 0 if form.residual is None else call.input(form.residual).strides[0],
                **code_constants(quant, p.kind),
            },
            threads=128 * tiles.groups + (128 if uneven else 32),
            shared=stages * stage + _BESIDES,
            suffix="a",
            dependent=True,
        ),
    )


def supports_codes(form: Form, node: NodeSpec, code: str) -> bool:
    """Where codes of the input are asked for and the weight has a scale a row."""
    weight = node.inputs[1]
    assert weight is not None
    return X_CODES.get(weight.quant) == node.activations == code and supports_few(form, node)


def many_tactics(op: str, form: Form) -> list[Tactic]:
    """The tactics of ``op``."""

    def made(name: str, codes: str, largest: int, priority: int) -> Tactic:
        """``codes``: type of the input's codes, "" where it has none."""

        def choose(n: int, k: int, max_tokens: int, quant: str) -> ManyTiles:
            return many_tiles(n, k, max_tokens, form.gated, quant, codes=bool(codes))

        def launches(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
            p = Product(form, call, max_tokens)
            tiles = choose(p.n, p.k, max_tokens, p.weight.quant)
            return many(form, call, tiles, max_tokens, codes=bool(codes))

        def nbytes(node: NodeSpec, max_tokens: int) -> int:
            x, weight = node.inputs[:2]
            assert x is not None
            assert weight is not None
            n, k = int(weight.shape[0]) // (2 if form.gated else 1), int(weight.shape[1])
            used = normed_bytes(form, k, x.dtype, max_tokens)
            if codes:
                used, _ = quantised_bytes(k, max_tokens)
            return used + partial_bytes(choose(n, k, max_tokens, weight.quant), max_tokens, form.gated)

        return Tactic(
            name=f"cuda.{op}.{name}",
            op=op,
            device="cuda",
            supports=lambda node: supports_codes(form, node, codes) if codes else supports_few(form, node),
            priority=priority,
            precision=codes or "bfloat16",
            sm=90,
            largest_tokens=largest,
            weight_layouts={1: LAYOUT},
            workspace=nbytes,
            launches=launches,
        )

    # Up to 64 tokens memory is what counts, and exact inputs cost nothing.
    return [
        *(made(f"packed_many{m}", "", m, 38 if m <= 64 else 35) for m in MANY_STEPS),
        *(made(f"codes_many.{code}", code, CODES_STEP, 36) for code in ("int8", "fp8")),
    ]
