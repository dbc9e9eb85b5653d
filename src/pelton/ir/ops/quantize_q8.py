"""quantize_q8: float32 rows to int8 in blocks of 32, the input that int8 products work on.

A value is ``d * q`` with ``d = max|x| / 127`` over its block. Explicit in the graph, so that products
which read one input share the work, and a norm can do it (as ``add_rms_norm_q8``).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.ir.op import Op, Sample, register

BLOCK = 32
BLOCK_BYTES = 44
"""Per block: int8 q[32], float32 d, float32 d * sum(q), and the int16 sums of q over the block's halves."""


def reference(x: torch.Tensor) -> torch.Tensor:
    """``x``: (T, K), K a multiple of 32 -> uint8 (T, K / 32 * 44), to be read by ``*_q8`` ops alone.

    Blocks of a row stand one after another (``BLOCK_BYTES``); the sums serve weights with offsets and zero
    points. A block with a value that is not finite has d = NaN.
    """
    blocks = x.float().reshape(x.shape[0], -1, BLOCK)
    finite = blocks.isfinite().all(-1, keepdim=True)
    top = torch.where(finite, blocks.abs().amax(-1, keepdim=True), 0.0)
    inverse = torch.where(top > 0, 127 / top, 0.0)
    q = torch.where(finite, torch.round(blocks * inverse), 0.0)
    return pack(q.to(torch.int8), torch.where(finite, top / 127, float("nan")))


def pack(q: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """``q``: int8 (T, blocks, 32), ``d``: float32 (T, blocks, 1) -> the bytes."""
    halves = q.int().unflatten(-1, (2, BLOCK // 2)).sum(-1)
    floats = torch.cat([d, d * halves.sum(-1, keepdim=True)], -1)
    parts = (q, floats.contiguous(), halves.to(torch.int16))
    return torch.cat([part.view(torch.uint8) for part in parts], -1).flatten(1)


def unpack(x_q8: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes' ``q`` and ``d``, as ``pack`` takes them."""
    blocks = x_q8.reshape(x_q8.shape[0], -1, BLOCK_BYTES)
    q = blocks[..., :BLOCK].contiguous().view(torch.int8)
    return q, blocks[..., BLOCK : BLOCK + 4].contiguous().view(torch.float32)


def dequantize(x_q8: torch.Tensor) -> torch.Tensor:
    """The values (T, K) float32 that the bytes stand for."""
    q, d = unpack(x_q8)
    return (q * d).flatten(1)


def shape_rule(x: torch.Tensor) -> torch.Tensor:
    assert x.shape[1] % BLOCK == 0, f"{x.shape[1]} columns do not divide into blocks of {BLOCK}"
    return x.new_empty((x.shape[0], x.shape[1] // BLOCK * BLOCK_BYTES), dtype=torch.uint8)


def samples(g: torch.Generator) -> Iterator[Sample]:
    for tokens, k in ((1, 64), (3, 576), (9, 1536)):
        yield Sample(args=(torch.randn(tokens, k, generator=g),), name=f"{tokens}x{k}")
    wide = torch.randn(4, 300, generator=g)
    yield Sample(args=(wide[:, 100:164],), name="strided rows")
    yield Sample(args=(torch.zeros(2, 64),), name="zeros")


OP = register(
    Op(
        name="quantize_q8",
        schema="quantize_q8(Tensor x) -> Tensor",
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 0.0},
        optional=True,
    )
)
