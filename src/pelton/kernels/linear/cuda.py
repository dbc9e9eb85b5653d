"""Products with dense weights on NVIDIA GPUs (``triton_gemv.py``, ``triton_gemm.py``, cuBLASLt).

Three shapes of the same product: one token reads the weight once and is bound by memory; a few dozen share
that read on tensor cores; more are bound by arithmetic, and cuBLASLt's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pelton.dtypes import ITEMSIZE
from pelton.kernels.launch import Builder, CallSpec, LaunchSpec, MatmulSpec, Term, Work, rows
from pelton.kernels.tactic import NodeSpec, Tactic

GEMV = "pelton.kernels.linear.triton_gemv"
GEMM = "pelton.kernels.linear.triton_gemm"
#: Multiprocessors that a product is spread over; an H200 has 132.
_PROGRAMS = 132


def supports_dense(node: NodeSpec) -> bool:
    x, weight, bias = node.inputs
    dense = ("float32", "float16", "bfloat16")
    assert x is not None
    assert weight is not None
    kinds = [x.dtype, weight.quant or weight.dtype] + ([bias.quant or bias.dtype] if bias else [])
    return all(kind in dense for kind in kinds)


def supports_cublaslt(node: NodeSpec) -> bool:
    x, weight, bias = node.inputs
    assert x is not None
    assert weight is not None
    return bias is None and (weight.quant or weight.dtype) == x.dtype in ("float32", "float16", "bfloat16")


def product(call: CallSpec, module: str, function: str) -> tuple[Builder, int, int]:
    weight = call.input(1)
    b = Builder(call, module, function).input("x", 0).input("weight", 1).input("bias", 2).output("out")
    return b, int(weight.shape[0]), int(weight.shape[1])


@dataclass(frozen=True)
class GemvTiles:
    """Rows of the weight a program takes, columns at a time, loads in flight."""

    block_n: int
    block_k: int
    stages: int
    warps: int


def gemv(call: CallSpec, tiles: GemvTiles) -> LaunchSpec:
    """One program for ``tiles.block_n`` rows of the weight and a token."""
    b, n, k = product(call, GEMV, "gemv")
    x = call.input(0)
    b.constants(N=n, K=k, X_ROW=x.strides[0], BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k)
    b.constants(STAGES=tiles.stages)
    return b.launch((Term(times=-(-n // tiles.block_n)),), (rows(x),), num_warps=tiles.warps)


def gemv_tiles(n: int, k: int) -> GemvTiles:
    """By the weight's shape; measured on an H200 (``benchmarks/h200_kernels.py``)."""
    return GemvTiles(4, 1024 if k >= 1024 else 256, 5, 4)


@dataclass(frozen=True)
class SkinnyTiles:
    """Tile of tokens, weight rows and columns; programs that share a tile's columns."""

    block_m: int
    block_n: int
    block_k: int
    split: int
    stages: int
    warps: int


def skinny(call: CallSpec, tiles: SkinnyTiles) -> LaunchSpec:
    """One program for a tile of weight rows, all tokens (up to ``tiles.block_m``) and a share of columns."""
    b, n, k = product(call, GEMM, "skinny")
    x = call.input(0)
    if tiles.split > 1:
        b.workspace("partial").counters("counters")
    else:
        b.constants(partial=None, counters=None)
    b.dim("tokens", x.shape[0]).constants(N=n, K=k, X_ROW=x.strides[0], BLOCK_M=tiles.block_m)
    b.constants(BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, SPLIT=tiles.split, STAGES=tiles.stages)
    return b.launch(
        (Term(times=-(-n // tiles.block_n)),),
        (rows(x, tiles.block_m),),
        (Term(times=tiles.split),),
        num_warps=tiles.warps,
    )


def skinny_tiles(n: int, k: int, tokens: int, itemsize: int = 2) -> SkinnyTiles:
    """By the weight's shape and the largest number of tokens; measured on an H200.

    ``itemsize``: bytes of an element; tiles of 4-byte ones are narrower, to fit into shared memory.
    """
    tiles = _skinny_tiles(n, k, tokens)
    return tiles if itemsize == 2 else replace(tiles, block_k=tiles.block_k // 4)


def _skinny_tiles(n: int, k: int, tokens: int) -> SkinnyTiles:
    block_m = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    if -(-n // 64) >= 2 * _PROGRAMS:  # enough rows for every multiprocessor
        return SkinnyTiles(16, 128, 128, 1, 3, 4) if tokens <= 16 else SkinnyTiles(block_m, 64, 64, 1, 3, 4)
    split = 4 if tokens <= 32 else 2
    while split > 1 and k // split < 512:
        split //= 2
    return SkinnyTiles(block_m, 64, 128, split, 3 if split == 4 else 5, 4)


def _skinny_bytes(node: NodeSpec, max_tokens: int) -> int:
    weight = node.inputs[1]
    assert weight is not None
    n, k = int(weight.shape[0]), int(weight.shape[1])
    tokens = min(max_tokens, 64)
    tiles = skinny_tiles(n, k, tokens)
    if tiles.split == 1:
        return 0
    return (
        -(-n // tiles.block_n) * -(-tokens // tiles.block_m) * tiles.split * tiles.block_n * tiles.block_m * 4
    )


def _gemv(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
    weight = call.input(1)
    return (gemv(call, gemv_tiles(int(weight.shape[0]), int(weight.shape[1]))),)


def _skinny(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
    weight = call.input(1)
    itemsize = max(ITEMSIZE[weight.dtype], ITEMSIZE[call.input(0).dtype])
    tiles = skinny_tiles(int(weight.shape[0]), int(weight.shape[1]), max_tokens, itemsize)
    return (skinny(call, tiles),)


def _gemm(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
    b, n, k = product(call, GEMM, "gemm")
    x = call.input(0)
    b.dim("tokens", x.shape[0])
    b.constants(N=n, K=k, X_ROW=x.strides[0], BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, GROUP=8, STAGES=3)
    return (b.launch((rows(x, 128, -(-n // 128)),), num_warps=8),)


def invariant_tiles(itemsize: int) -> SkinnyTiles:
    """One shape of tile for every step: a row's sum runs over its columns in one order."""
    return SkinnyTiles(64, 64, 64 if itemsize == 2 else 32, 1, 3, 4)


def _invariant(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
    return (skinny(call, invariant_tiles(ITEMSIZE[call.input(0).dtype])),)


def cublaslt(call: CallSpec, *, to_workspace: bool = False) -> MatmulSpec:
    """Input 0 times input 1, all of its rows."""
    x, weight, out = call.input(0), call.input(1), call.outputs[0]
    n, k = int(weight.shape[0]), int(weight.shape[1])
    return MatmulSpec(
        n=n, k=k, x_row=x.strides[0], dtype=x.dtype, out_dtype=out.dtype, to_workspace=to_workspace
    )


def _cublaslt(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
    return (cublaslt(call),)


Launches = Callable[[CallSpec, int], tuple[Work, ...]]


def _tactic(
    name: str,
    launches: Launches,
    priority: int,
    *,
    largest: int = 0,
    supports: Callable[[NodeSpec], bool] = supports_dense,
    workspace: Callable[[NodeSpec, int], int] = lambda node, max_tokens: 0,
    invariant: bool = False,
) -> Tactic:
    return Tactic(
        name=f"cuda.linear.{name}",
        op="linear",
        device="cuda",
        supports=supports,
        priority=priority,
        precision="bfloat16",
        batch_invariant=invariant,
        largest_tokens=largest,
        workspace=workspace,
        launches=launches,
    )


TACTICS = [
    _tactic("gemv", _gemv, 40, largest=1),
    *(_tactic(f"skinny{m}", _skinny, 30, largest=m, workspace=_skinny_bytes) for m in (16, 32, 64)),
    _tactic("cublaslt", _cublaslt, 20, supports=supports_cublaslt),
    _tactic("gemm", _gemm, 10),
    _tactic("invariant", _invariant, 0, invariant=True),
]
