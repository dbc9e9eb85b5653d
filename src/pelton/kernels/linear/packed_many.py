"""Products of dozens to hundreds of tokens with packed weights, for sm_90 (``hopper_packed.cu``)."""

from __future__ import annotations

from dataclasses import dataclass

from pelton.kernels.launch import CallSpec, CudaBuilder, TensorMap, Term, Work, rows
from pelton.kernels.linear.packed import LAYOUT, type_constants
from pelton.kernels.linear.packed_few import UNIT, code_constants, supports_few
from pelton.kernels.linear.products import Form, Product, normed_bytes
from pelton.kernels.linear.tiles import PROCESSORS
from pelton.kernels.tactic import NodeSpec, Tactic

FILE = "linear/hopper_packed.cu"
#: Largest numbers of tokens that have a kernel.
MANY_STEPS = (32, 64, 128)
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


def many_tiles(n: int, k: int, tokens: int, gated: bool, quant: str) -> ManyTiles:
    """For ``n`` results of each of up to ``tokens`` tokens."""
    return ManyTiles(next((t for t in (32, 64) if tokens <= t), 128), 2)


def partial_bytes(tiles: ManyTiles, max_tokens: int, gated: bool) -> int:
    """Workspace of the tiles that blocks share."""
    block = 2 * tiles.groups * 64 * tiles.tokens * 4 * (2 if gated else 1)
    return -(-max_tokens // tiles.tokens) * PROCESSORS * block


def many(form: Form, call: CallSpec, tiles: ManyTiles, max_tokens: int) -> tuple[Work, ...]:
    """A norm into the workspace, where there is one, and the product."""
    p = Product(form, call, max_tokens)
    quant = p.weight.quant
    kind = type_constants(quant)
    halves = 2 if form.gated else 1
    row = 2 * (p.k if form.norm is not None else p.x.strides[0])
    x_map = TensorMap(
        dtype=p.x.dtype, shape=(p.k, max_tokens), strides=(row,), box=(_ROW_BYTES // 2, tiles.tokens)
    )
    b = CudaBuilder(call, FILE, "packed").input(1)
    b = b.tensor_map(0, x_map) if form.norm is None else b.workspace_map(0, x_map)
    bias = call.inputs[2] is not None
    for index in (2 if bias else None, form.residual):
        b = b.nothing() if index is None else b.input(index)
    b.output().workspace(p.scratch).counters().dim(p.x.shape[0])
    eight = kind["CODE"] in ("e4m3", "s8", "u8")
    group = int(kind["GROUP"])
    area = 16 * ((2 if kind["SCALE"] == "float16" else 4) + int(kind["ZERO"]))
    panel = (2048 if eight else 1024) + (UNIT // group * area if group else 0)
    stage = 2 * tiles.tokens * _ROW_BYTES + halves * tiles.groups * 4 * panel
    stage = -(-stage // 1024) * 1024
    stages = min(_MOST_STAGES, (_SHARED - _BESIDES) // stage)
    # Every block has work: those that share a tile are counted by their numbers.
    units = -(-p.n // (64 * tiles.groups)) * (p.k // UNIT)
    uneven = halves * tiles.tokens // 2 > 64
    return (
        *p.norm(),
        b.launch(
            (Term(times=min(PROCESSORS, units)),),
            (rows(p.x, tiles.tokens),),
            constants={
                "RESULTS": p.n,
                "INNER": p.k,
                "TOKENS": tiles.tokens,
                "GROUPS": tiles.groups,
                "STAGES": stages,
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


def many_tactics(op: str, form: Form) -> list[Tactic]:
    """The tactics of ``op``."""

    def choose(n: int, k: int, max_tokens: int, quant: str) -> ManyTiles:
        return many_tiles(n, k, max_tokens, form.gated, quant)

    def launches(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
        p = Product(form, call, max_tokens)
        return many(form, call, choose(p.n, p.k, max_tokens, p.weight.quant), max_tokens)

    def nbytes(node: NodeSpec, max_tokens: int) -> int:
        x, weight = node.inputs[:2]
        assert x is not None
        assert weight is not None
        n, k = int(weight.shape[0]) // (2 if form.gated else 1), int(weight.shape[1])
        used = normed_bytes(form, k, x.dtype, max_tokens)
        return used + partial_bytes(choose(n, k, max_tokens, weight.quant), max_tokens, form.gated)

    return [
        Tactic(
            name=f"cuda.{op}.packed_many{m}",
            op=op,
            device="cuda",
            supports=lambda node: supports_few(form, node),
            priority=38 if m <= 64 else 35,
            precision="bfloat16",
            sm=90,
            largest_tokens=m,
            weight_layouts={1: LAYOUT},
            workspace=nbytes,
            launches=launches,
        )
        for m in MANY_STEPS
    ]
