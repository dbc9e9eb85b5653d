"""The tactics of the GPU's matrix products, whatever an op has around them."""

from __future__ import annotations

from collections.abc import Callable

from pelton.dtypes import ITEMSIZE
from pelton.kernels.launch import CallSpec, Work
from pelton.kernels.linear import hopper
from pelton.kernels.linear.products import (
    MOST_NORMED,
    Form,
    Launches,
    Product,
    cublaslt,
    gemm,
    gemv,
    hopper_call,
    invariant,
    normed_bytes,
    normed_workspace,
    stream,
    supports_dense,
    whole_tiles,
)
from pelton.kernels.linear.tiles import (
    GEMV_PREFETCH,
    StreamTiles,
    gemv_tiles,
    hopper_tiles,
    invariant_tiles,
    stream_tiles,
)
from pelton.kernels.tactic import NodeSpec, Tactic

#: Steps, tokens, that the kernel of sm_90 has forms for.
_HOPPER_TOKENS = (8, 16)


def _supports_gemv(form: Form, node: NodeSpec) -> bool:
    weight = node.inputs[1]
    assert weight is not None
    return supports_dense(form, node) and int(weight.shape[1]) % 2 == 0


def _supports_cublaslt(form: Form, node: NodeSpec) -> bool:
    x, weight, bias = node.inputs[:3]
    assert x is not None
    assert weight is not None
    # Gated, the second half of a row must be aligned as pointers of the kernel are.
    aligned = not form.gated or int(weight.shape[0]) % 32 == 0
    return (
        supports_dense(form, node) and bias is None and (weight.quant or weight.dtype) == x.dtype and aligned
    )


def _supports_hopper(form: Form, node: NodeSpec) -> bool:
    x, weight, bias = node.inputs[:3]
    assert x is not None
    assert weight is not None
    k = int(weight.shape[1])
    vectors = [bias, None if form.norm is None else node.inputs[form.norm]]
    residual = x if form.residual is None else node.inputs[form.residual]
    return (
        supports_dense(form, node)
        and residual is not None
        # Normed, x is multiplied by the norm's weight before it is scaled: too much for float16.
        and x.dtype in (("bfloat16",) if form.norm is not None else ("bfloat16", "float16"))
        and x.dtype == residual.dtype == (weight.quant or weight.dtype)
        and all(v is None or v.dtype == "float32" for v in vectors)
        and k % 8 == 0
        and (form.norm is None or k <= MOST_NORMED)
    )


def _node_sizes(form: Form, node: NodeSpec) -> tuple[int, int, str, int]:
    """(n, k, dtype of x, bytes of the widest element)."""
    x, weight = node.inputs[:2]
    assert x is not None
    assert weight is not None
    n = int(weight.shape[0]) // (2 if form.gated else 1)
    return n, int(weight.shape[1]), x.dtype, max(ITEMSIZE[x.dtype], ITEMSIZE[weight.quant or weight.dtype])


def _stream_bytes(form: Form, node: NodeSpec, max_tokens: int, tiles: StreamTiles) -> int:
    n, k, dtype, _ = _node_sizes(form, node)
    total = normed_bytes(form, k, dtype, max_tokens)
    if not whole_tiles(tiles, n, k):
        tile = tiles.block_n * tiles.block_m * 4 * (2 if form.gated else 1)
        total += -(-max_tokens // tiles.block_m) * 2 * tiles.programs * tile
    return total


def _cublaslt_bytes(form: Form, node: NodeSpec, max_tokens: int) -> int:
    n, k, dtype, _ = _node_sizes(form, node)
    total = normed_bytes(form, k, dtype, max_tokens)
    return total + (max_tokens * 2 * n * ITEMSIZE[dtype] if form.gated else 0)


def tactics(op: str, form: Form) -> list[Tactic]:
    """The tactics of ``op``."""

    def tactic(
        name: str,
        launches: Launches,
        priority: int,
        nbytes: Callable[[NodeSpec, int], int],
        supports: Callable[[Form, NodeSpec], bool] = supports_dense,
        largest: int = 0,
        batch_invariant: bool = False,
        sm: int = 0,
    ) -> Tactic:
        return Tactic(
            name=f"cuda.{op}.{name}",
            op=op,
            device="cuda",
            supports=lambda node: supports(form, node),
            priority=priority,
            precision="bfloat16",
            batch_invariant=batch_invariant,
            largest_tokens=largest,
            sm=sm,
            workspace=nbytes,
            launches=launches,
        )

    def gemv_launches(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
        p = Product(form, call, 1)
        tiles = gemv_tiles(p.n, p.k, form.gated, form.norm is not None)
        return (gemv(form, call, tiles, GEMV_PREFETCH),)

    def stream_launches(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
        p = Product(form, call, max_tokens)
        return stream(form, call, stream_tiles(p.n, p.k, max_tokens, form.gated, p.itemsize), max_tokens)

    def stream_nbytes(node: NodeSpec, max_tokens: int) -> int:
        n, k, _, itemsize = _node_sizes(form, node)
        return _stream_bytes(form, node, max_tokens, stream_tiles(n, k, max_tokens, form.gated, itemsize))

    def hopper_launches(largest: int) -> Launches:
        def launches(call: CallSpec, max_tokens: int) -> tuple[Work, ...]:
            p = Product(form, call, max_tokens)
            if not p.copies():
                return stream_launches(call, max_tokens)
            tiles = hopper_tiles(p.n, largest, form.gated)
            return (hopper.product(call, hopper_call(form, call, max_tokens), tiles),)

        return launches

    def invariant_nbytes(node: NodeSpec, max_tokens: int) -> int:
        n, _, _, itemsize = _node_sizes(form, node)
        return _stream_bytes(form, node, max_tokens, invariant_tiles(n, itemsize, form.gated))

    return [
        *(
            # The fewer tokens it is for, the sooner it is taken.
            tactic(
                f"hopper{m}", hopper_launches(m), 60 - i, stream_nbytes, _supports_hopper, largest=m, sm=90
            )
            for i, m in enumerate(_HOPPER_TOKENS)
        ),
        tactic("gemv", gemv_launches, 40, lambda node, tokens: 0, _supports_gemv, largest=1),
        tactic("stream16", stream_launches, 30, stream_nbytes, largest=16),
        # Where cuBLASLt cannot: its own are as fast.
        *(
            tactic(f"stream{m}", stream_launches, p, stream_nbytes, largest=m)
            for m, p in ((32, 15), (64, 14))
        ),
        tactic(
            "cublaslt",
            lambda call, tokens: cublaslt(form, call, tokens),
            20,
            lambda node, tokens: _cublaslt_bytes(form, node, tokens),
            _supports_cublaslt,
        ),
        tactic("gemm", lambda call, tokens: gemm(form, call, tokens), 10, normed_workspace(form)),
        tactic(
            "invariant",
            lambda call, tokens: invariant(form, call, tokens),
            0,
            invariant_nbytes,
            batch_invariant=True,
        ),
    ]
