"""Gated products on NVIDIA GPUs: the forms of ``linear``, each with both halves of a row at hand.

For many tokens cuBLASLt leaves both halves in the workspace, and one more kernel joins them.
"""

from __future__ import annotations

from collections.abc import Callable

from pelton.dtypes import ITEMSIZE
from pelton.kernels.gated_activation.cuda import KINDS
from pelton.kernels.gated_activation.cuda import MODULE as GATED
from pelton.kernels.launch import Builder, CallSpec, Term, Work, power_of_two, rows
from pelton.kernels.linear.cuda import (
    GEMM,
    GEMV,
    cublaslt,
    gemv_tiles,
    product,
    skinny_tiles,
    supports_cublaslt,
    supports_dense,
)
from pelton.kernels.tactic import NodeSpec, Tactic


def _gemv(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
    b, n, k = product(call, GEMV, "gemv_gated")
    x, tiles = call.input(0), gemv_tiles(n, k)
    b.constants(N=n // 2, K=k, X_ROW=x.strides[0], KIND=str(call.attrs["kind"]))
    # Two rows of weights for each result: as many loads in flight with half the rows.
    block_n = max(1, tiles.block_n // 2)
    b.constants(BLOCK_N=block_n, BLOCK_K=tiles.block_k, STAGES=tiles.stages)
    return (b.launch((Term(times=-(-n // 2 // block_n)),), (rows(x),), num_warps=tiles.warps),)


def _skinny(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
    b, n, k = product(call, GEMM, "skinny_gated")
    x, weight = call.input(0), call.input(1)
    tiles = skinny_tiles(n, k, max_tokens, max(ITEMSIZE[weight.dtype], ITEMSIZE[x.dtype]))
    block_n = tiles.block_n // 2
    b.dim("tokens", x.shape[0]).constants(N=n // 2, K=k, X_ROW=x.strides[0], KIND=str(call.attrs["kind"]))
    b.constants(BLOCK_M=tiles.block_m, BLOCK_N=block_n, BLOCK_K=tiles.block_k, STAGES=tiles.stages)
    grid = (Term(times=-(-n // 2 // block_n)),), (rows(x, tiles.block_m),)
    return (b.launch(*grid, num_warps=tiles.warps),)


def _cublaslt(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
    x, out = call.input(0), call.outputs[0]
    both = int(call.input(1).shape[0])
    width, block = both // 2, min(1024, power_of_two(both // 2))
    b = Builder(call, GATED, "gated_activation")
    b.workspace("gate", dtype=out.dtype).workspace("up", width * ITEMSIZE[out.dtype], dtype=out.dtype)
    b.output("out").constants(WIDTH=width, GATE_ROW=both, UP_ROW=both, KIND=str(call.attrs["kind"]))
    b.constants(BLOCK=block)
    return cublaslt(call, to_workspace=True), b.launch((rows(x),), (Term(times=-(-width // block)),))


def _product_bytes(node: NodeSpec, max_tokens: int) -> int:
    x, weight = node.inputs[0], node.inputs[1]
    assert x is not None
    assert weight is not None
    return max_tokens * int(weight.shape[0]) * ITEMSIZE[x.dtype]


def _supports(node: NodeSpec) -> bool:
    return supports_dense(node) and node.attrs["kind"] in KINDS


def _supports_cublaslt(node: NodeSpec) -> bool:
    weight = node.inputs[1]
    assert weight is not None
    # The second half of a row must be aligned as pointers of the kernel are.
    return supports_cublaslt(node) and node.attrs["kind"] in KINDS and int(weight.shape[0]) % 32 == 0


def _tactic(
    name: str,
    launches: Callable[[CallSpec, int], tuple[Work, ...]],
    priority: int,
    *,
    largest: int = 0,
    supports: Callable[[NodeSpec], bool] = _supports,
    workspace: Callable[[NodeSpec, int], int] = lambda node, max_tokens: 0,
) -> Tactic:
    return Tactic(
        name=f"cuda.linear_gated.{name}",
        op="linear_gated",
        device="cuda",
        supports=supports,
        priority=priority,
        precision="bfloat16",
        largest_tokens=largest,
        workspace=workspace,
        launches=launches,
    )


TACTICS = [
    _tactic("gemv", _gemv, 40, largest=1),
    *(_tactic(f"skinny{m}", _skinny, 30, largest=m) for m in (16, 32, 64)),
    _tactic("cublaslt", _cublaslt, 20, supports=_supports_cublaslt, workspace=_product_bytes),
]
