"""Products of a few tokens with packed weights, for sm_90 (``packed.cu``)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pelton.dtypes import GPU_BLOCK_TYPES
from pelton.kernels.gated_activation.cuda import KINDS
from pelton.kernels.launch import CallSpec, CudaBuilder, LaunchSpec, Term, Work
from pelton.kernels.linear.packed import LAYOUT, type_constants
from pelton.kernels.linear.products import Form, Product
from pelton.kernels.linear.tiles import PROCESSORS
from pelton.kernels.tactic import NodeSpec, Tactic

FILE = "linear/packed.cu"
#: Columns that a warp takes at a time.
UNIT = 128
#: Of a multiprocessor, for its blocks.
_SHARED = 227 << 10
#: Values of the constants GATED and CODE.
_ACTIVATIONS = {"": 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4}
_CODES = {"u4": 0, "e4m3": 1, "s8": 2, "u8": 3, "e2m1": 4}
#: Largest numbers of tokens that have a kernel.
FEW_STEPS = (8, 16)


@dataclass(frozen=True)
class FewTiles:
    """Tokens; warps of a block, 16 rows (gated: of each half) at a time, blocks of a multiprocessor."""

    tokens: int
    warps: int
    batch: int
    blocks: int


def few_tiles(n: int, k: int, tokens: int, gated: bool, quant: str) -> FewTiles:
    """For ``n`` results of each of up to ``tokens``; measured on an H200 (``h200_quant_kernels.py``)."""
    short = n <= 2 * 16 * PROCESSORS  # two panels of a multiprocessor at most
    if tokens > 8:
        return FewTiles(16, 16, 2 if short else 3, 1)
    eight = type_constants(quant)["CODE"] in ("e4m3", "s8", "u8")
    if gated and eight:
        return FewTiles(8, 8, 2, 2)
    return FewTiles(8, 16, 2, 1) if short and not gated else FewTiles(8, 8, 1, 3)


def code_constants(quant: str, activation: str) -> dict[str, int]:
    """What ``gpu/decode.cuh`` must know."""
    kind = type_constants(quant)
    return {
        "CODE": _CODES[str(kind["CODE"])],
        "GROUP": int(kind["GROUP"]),
        "HALF_SCALES": int(kind["SCALE"] == "float16"),
        "ZERO": int(kind["ZERO"]),
        "GATED": _ACTIVATIONS[activation],
    }


def few(form: Form, call: CallSpec, tiles: FewTiles) -> LaunchSpec:
    """A norm before, an activation, bias and residual after are the kernel's."""
    p = Product(form, call, tiles.tokens)
    b = CudaBuilder(call, FILE, "packed").input(1).input(0)
    bias = call.inputs[2] is not None
    for index in (2 if bias else None, form.residual, form.norm):
        b = b.nothing() if index is None else b.input(index)
    b.output().dim(p.x.shape[0]).number(float(call.attrs.get("eps", 0.0)))
    assert p.x.strides[0] % 8 == 0 or p.x.shape[0] == 1, "rows begin at multiples of 16 bytes"
    sums = 4 * tiles.warps * tiles.tokens * (tiles.batch * (2 if form.gated else 1) * 16 + 1)
    unit = tiles.warps * tiles.tokens * 2 * UNIT
    all_units = -(-p.k // UNIT // tiles.warps)
    resident = tiles.blocks * (sums + unit * all_units + 1024) <= _SHARED
    x_units = all_units if resident else 1
    return b.launch(
        (Term(times=min(tiles.blocks * PROCESSORS, p.n // 16)),),
        constants={
            "RESULTS": p.n,
            "INNER": p.k,
            "TOKENS": tiles.tokens,
            "WARPS": tiles.warps,
            "BATCH": tiles.batch,
            "BLOCKS": tiles.blocks,
            "X_UNITS": x_units,
            "NORM": int(form.norm is not None),
            "BIAS": int(bias),
            "RESIDUAL": int(form.residual is not None),
            "X_ROW": p.x.strides[0],
            "R_ROW": 0 if form.residual is None else call.input(form.residual).strides[0],
            **code_constants(p.weight.quant, p.kind),
        },
        threads=32 * tiles.warps,
        shared=sums + unit * x_units,
        suffix="a",
        dependent=True,
    )


def supports_few(form: Form, node: NodeSpec) -> bool:
    """bfloat16, whole units of the weight, vectors in float32 as engines have them."""
    x, weight, *_ = node.inputs
    assert x is not None
    assert weight is not None
    if weight.quant not in GPU_BLOCK_TYPES:
        return False
    kind = type_constants(weight.quant)
    vectors = [node.inputs[i] for i in (2, form.norm) if i is not None]
    plain = all(t is None or (t.quant or t.dtype) == "float32" for t in vectors)
    rows = [x] + ([] if form.residual is None else [node.inputs[form.residual]])
    halves = 2 if form.gated else 1
    return (
        plain
        and all(t is not None and t.dtype == "bfloat16" for t in rows)
        and kind["CODE"] in _CODES
        and kind["SCALE"] in ("float16", "float32")
        and int(weight.shape[0]) % (16 * halves) == 0
        and int(weight.shape[1]) % UNIT == 0
        and (not form.gated or node.attrs["kind"] in KINDS)
    )


def few_tactics(op: str, form: Form) -> list[Tactic]:
    """The tactics of ``op``."""

    def launches(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
        p = Product(form, call, max_tokens)
        return (few(form, call, few_tiles(p.n, p.k, max_tokens, form.gated, p.weight.quant)),)

    tactic = Tactic(
        name=f"cuda.{op}.packed_few",
        op=op,
        device="cuda",
        supports=lambda node: supports_few(form, node),
        priority=45,
        precision="bfloat16",
        sm=90,
        weight_layouts={1: LAYOUT},
        launches=launches,
    )
    # Gated, sixteen tokens are faster in tiles of 64 rows.
    steps = FEW_STEPS[:1] if form.gated else FEW_STEPS
    return [replace(tactic, name=f"{tactic.name}{m}", largest_tokens=m) for m in steps]
