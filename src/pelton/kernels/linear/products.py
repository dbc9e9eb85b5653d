"""How the GPU's matrix products are launched, with what an op may have around them.

Three shapes of the same product: one token reads the weight once and is bound by memory (``gemv``); some
dozens share that read on tensor cores (``stream``); more are bound by arithmetic, and cuBLASLt's. A norm
before is part of the first, and a kernel of its own before the others; an activation, bias or residual after
is part of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pelton.dtypes import CODE_DTYPES, ITEMSIZE
from pelton.ir.float16_sums import COLUMNS
from pelton.kernels.gated_activation.cuda import KINDS
from pelton.kernels.gated_activation.cuda import MODULE as GATED
from pelton.kernels.launch import (
    COUNTERS,
    FOOTPRINT,
    Argument,
    Builder,
    CallSpec,
    MatmulSpec,
    Term,
    Work,
    power_of_two,
    rows,
    workspace,
)
from pelton.kernels.linear import hopper
from pelton.kernels.linear.tiles import GemvTiles, StreamTiles, invariant_tiles
from pelton.kernels.rms_norm.cuda import norm_launch
from pelton.kernels.tactic import NodeSpec, no_codes

GEMV = "pelton.kernels.linear.triton_gemv"
GEMM = "pelton.kernels.linear.triton_gemm"
STREAM = "pelton.kernels.linear.triton_stream"
_DENSE = ("float32", "float16", "bfloat16")
#: Columns whose norm's weights the kernel of sm_90 for up to 16 tokens keeps beside its tiles.
MOST_NORMED = 1 << 13
#: Parts of the workspace begin at multiples of so many bytes.
_ALIGN = 256


@dataclass(frozen=True)
class Form:
    """What an op has around the product of its inputs 0 and 1 and the bias, input 2: by input index."""

    gated: bool = False
    """The weight has gate rows, then as many up rows; the result is ``act(gate) * up``."""
    residual: int | None = None
    """Added to the result."""
    norm: int | None = None
    """Weight of the RMS norm that input 0 passes first."""


Launches = Callable[[CallSpec, int], tuple[Work, ...]]


def supports_dense(form: Form, node: NodeSpec) -> bool:
    """Nothing packed, no codes; an activation that the kernels know."""
    kinds = [t.quant or t.dtype for t in node.inputs if t is not None]
    known = not form.gated or node.attrs["kind"] in KINDS
    return all(kind in _DENSE for kind in kinds) and known and no_codes(node)


def aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def normed_bytes(form: Form, k: int, dtype: str, max_tokens: int) -> int:
    """Of the normed rows, which lie at the beginning of the workspace."""
    return aligned(max_tokens * k * ITEMSIZE[dtype]) if form.norm is not None else 0


class Product:
    """The parts of a call that every kernel of it needs."""

    def __init__(self, form: Form, call: CallSpec, max_tokens: int) -> None:
        self.form, self.call, self.max_tokens = form, call, max_tokens
        self.x, self.weight = call.input(0), call.input(1)
        stacked, self.k = int(self.weight.shape[0]), int(self.weight.shape[1])
        self.n = stacked // 2 if form.gated else stacked
        self.kind = str(call.attrs["kind"]) if form.gated else ""
        self.itemsize = max(ITEMSIZE[self.weight.dtype], ITEMSIZE[self.x.dtype])
        self.coded = self.x.dtype in CODE_DTYPES.values()
        """Whether x is codes already, of the static scale ``x_scale``."""
        self.x_scale = float(call.attrs.get("x_scale") or 0.0)
        self.y_scale = float(call.attrs.get("y_scale") or 0.0)
        """0: the result is no codes."""
        self.scratch = normed_bytes(form, self.k, self.x.dtype, max_tokens)
        """Where the workspace is free, in bytes."""

    def copies(self) -> bool:
        """Whether x and its rows lie as tensor copies want them."""
        others = [o for o in (self.x, *self.call.inputs[1:], *self.call.outputs) if o is not None]
        return self.x.strides[0] * ITEMSIZE[self.x.dtype] % 16 == 0 and all(o.aligned for o in others)

    def norm(self) -> tuple[Work, ...]:
        """The norm into the workspace, where the op has one."""
        if self.form.norm is None:
            return ()
        return (norm_launch(self.call, self.form.norm, to_workspace=True),)

    def builder(self, module: str, function: str, *, normed: bool, unpacked: int | None = None) -> Builder:
        """x, weight, bias, residual; ``normed``: x lies in the workspace; ``unpacked``: so does the weight,
        as dense rows of x's type, from that byte on."""
        b = Builder(self.call, module, function)
        b = b.workspace("x", dtype=self.x.dtype) if normed else b.input("x", 0)
        if unpacked is None:
            b.input("weight", 1)
        else:
            b.workspace("weight", unpacked, dtype=self.x.dtype)
        b.input("bias", 2)
        if self.form.residual is None:
            b.constants(residual=None, R_ROW=0)
        else:
            b.input("residual", self.form.residual)
            b.constants(R_ROW=self.call.input(self.form.residual).strides[0])
        b.constants(N=self.n, K=self.k, X_ROW=self.k if normed else self.x.strides[0], KIND=self.kind)
        return b


def gemv(form: Form, call: CallSpec, tiles: GemvTiles, prefetch: int = 0) -> Work:
    """Each row of x by itself. ``prefetch``: bytes of a row of the weight, a multiple of 16."""
    p = Product(form, call, 1)
    b = p.builder(GEMV, "gemv", normed=False)
    if form.norm is None:
        b.constants(norm=None)
    else:
        b.input("norm", form.norm)
    b.output("out").number("eps", float(call.attrs.get("eps", 0.0)))
    programs = min(tiles.programs, -(-p.n // tiles.block_n))
    b.constants(BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, PROGRAMS=programs, STAGES=tiles.stages)
    b.constants(PREFETCH=_prefetch(p, prefetch))
    grid = (Term(times=programs),), (rows(p.x),)
    return b.launch(*grid, num_warps=tiles.warps, dependent=True, footprint=FOOTPRINT)


def stream(
    form: Form, call: CallSpec, tiles: StreamTiles, max_tokens: int, prefetch: int = 0
) -> tuple[Work, ...]:
    """A norm into the workspace, where there is one, and the product."""
    p = Product(form, call, max_tokens)
    b = p.builder(STREAM, "stream", normed=form.norm is not None).output("out")
    b.workspace("partial", p.scratch).counters("counters").dim("tokens", p.x.shape[0])
    b.constants(BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k)
    b.constants(PROGRAMS=tiles.programs, STAGES=tiles.stages, PREFETCH=_prefetch(p, prefetch))
    shared = not whole_tiles(tiles, p.n, p.k)
    assert not shared or -(-p.n // tiles.block_n) * -(-max_tokens // tiles.block_m) <= COUNTERS
    grid = (Term(times=tiles.programs),), (rows(p.x, tiles.block_m),)
    return *p.norm(), b.launch(*grid, num_warps=tiles.warps, dependent=True)


def hopper_call(form: Form, call: CallSpec, max_tokens: int) -> hopper.HopperProduct:
    """As the kernels of sm_90 are told of it."""
    p = Product(form, call, max_tokens)
    return hopper.HopperProduct(
        n=p.n,
        k=p.k,
        kind=p.kind,
        dtype=p.x.dtype,
        max_tokens=max_tokens,
        residual=form.residual,
        norm=form.norm,
        bias=call.inputs[2] is not None,
        quant=p.weight.quant,
        x_scale=p.x_scale if p.coded else 0.0,
        y_scale=p.y_scale,
    )


def _prefetch(p: Product, nbytes: int) -> int:
    """What the kernel may ask for: within a row that begins at a multiple of 16 bytes."""
    row = p.k * ITEMSIZE[p.weight.dtype]
    return min(nbytes, row) if row % 16 == 0 and p.weight.aligned else 0


def whole_tiles(tiles: StreamTiles, n: int, k: int) -> bool:
    """Whether every program has whole tiles, so that none is shared."""
    k_tiles = -(-k // tiles.block_k)
    units = -(-n // tiles.block_n) * k_tiles
    return units % tiles.programs == 0 and units // tiles.programs % k_tiles == 0


def cublaslt(
    form: Form, call: CallSpec, max_tokens: int, weight: Argument | None = None, used: int = 0
) -> tuple[Work, ...]:
    """The norm before and the activation after are kernels of their own; the residual is cuBLASLt's C.

    ``weight``: where the dense weight is (input 1); ``used``: bytes of the workspace besides the normed rows
    that are taken.
    """
    p = Product(form, call, max_tokens)
    p.scratch += used
    out = call.outputs[0]
    normed = form.norm is not None
    product = MatmulSpec(
        n=2 * p.n if form.gated else p.n,
        k=p.k,
        x_row=p.k if normed else p.x.strides[0],
        dtype=p.x.dtype,
        out_dtype=out.dtype,
        x=workspace(0) if normed else Argument("input"),
        weight=weight or Argument("input", index=1),
        out=workspace(p.scratch) if form.gated else Argument("output"),
        residual=None if form.residual is None else Argument("input", index=form.residual),
        residual_row=0 if form.residual is None else call.input(form.residual).strides[0],
    )
    if not form.gated:
        return *p.norm(), product
    block = min(1024, power_of_two(p.n))
    b = Builder(call, GATED, "gated_activation")
    b.workspace("gate", p.scratch, dtype=out.dtype)
    b.workspace("up", p.scratch + p.n * ITEMSIZE[out.dtype], dtype=out.dtype)
    b.output("out").constants(WIDTH=p.n, GATE_ROW=2 * p.n, UP_ROW=2 * p.n, KIND=p.kind, BLOCK=block)
    return *p.norm(), product, b.launch((rows(p.x),), (Term(times=-(-p.n // block)),), dependent=True)


def gemm(
    form: Form, call: CallSpec, max_tokens: int, unpacked: int | None = None, *, half_sums: bool = False
) -> tuple[Work, ...]:
    """Many tokens where cuBLASLt cannot. ``unpacked``: its byte of the workspace where the weight is.

    ``half_sums``: sums of ``COLUMNS`` columns are in float16, as x and the weight.
    """
    p = Product(form, call, max_tokens)
    block_n = 64 if form.gated else 128
    b = p.builder(GEMM, "gemm", normed=form.norm is not None, unpacked=unpacked)
    b = b.output("out").dim("tokens", p.x.shape[0])
    b.constants(BLOCK_M=128, BLOCK_N=block_n, BLOCK_K=COLUMNS if p.itemsize == 2 else 32, GROUP=8, STAGES=3)
    b.constants(HALF_SUMS=half_sums)
    return *p.norm(), b.launch((rows(p.x, 128, -(-p.n // block_n)),), num_warps=8)


def invariant(form: Form, call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
    """In tiles that do not go by the tokens, so that a row's sums have one order."""
    p = Product(form, call, max_tokens)
    return stream(form, call, invariant_tiles(p.n, p.itemsize, form.gated), max_tokens)


def normed_workspace(form: Form) -> Callable[[NodeSpec, int], int]:
    """Workspace, bytes, of a tactic that has normed rows there and nothing else."""

    def nbytes(node: NodeSpec, max_tokens: int) -> int:
        x, weight = node.inputs[:2]
        assert x is not None
        assert weight is not None
        return normed_bytes(form, int(weight.shape[1]), x.dtype, max_tokens)

    return nbytes
