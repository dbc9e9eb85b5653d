"""embedding: rows of a (possibly quantised) table, as float32."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.dtypes import BLOCK_TYPES, PACKED_TYPES
from pelton.ir.op import Op, Sample, register


def reference(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``ids``: (T,) int32; ``weight``: (V, H) -> (T, H) in the weight's dtype."""
    return weight[ids.long()]


def shape_rule(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight.new_empty((ids.shape[0], weight.shape[1]))


def samples(g: torch.Generator) -> Iterator[Sample]:
    for vocab, hidden in ((50, 64), (33, 256)):
        ids = torch.randint(0, vocab, (9,), generator=g, dtype=torch.int32)
        for quant in ("float32", "bfloat16", "float16", *PACKED_TYPES):
            if quant in BLOCK_TYPES and hidden % BLOCK_TYPES[quant].block_size:
                continue
            w = torch.randn(vocab, hidden, generator=g)
            yield Sample(args=(ids, w), name=f"{quant} {vocab}x{hidden}", quant={1: quant})


OP = register(
    Op(
        name="embedding",
        schema="embedding(Tensor ids, Tensor weight) -> Tensor",
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 1e-6, "bfloat16": 1e-2},
    )
)
