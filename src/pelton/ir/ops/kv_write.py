"""kv_write: store this step's keys and values in the paged cache. An ordered effect."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.ir.op import Op, Sample, register


def reference(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """``k``, ``v``: (T, Hkv, D), any row stride; caches: (blocks, Hkv, block_size, D).

    ``slot_mapping``: (T,) int32, slot = block * block_size + offset; -1 writes nothing.
    """
    keep = slot_mapping >= 0
    slots = slot_mapping[keep].long()
    block, offset = slots // k_cache.shape[2], slots % k_cache.shape[2]
    k_cache[block, :, offset] = k[keep].to(k_cache.dtype)
    v_cache[block, :, offset] = v[keep].to(v_cache.dtype)


def shape_rule(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    return None


def samples(g: torch.Generator) -> Iterator[Sample]:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        k, v = torch.randn(2, 6, 3, 64, generator=g)
        caches = torch.randn(2, 5, 3, 4, 64, generator=g).to(dtype)
        slots = torch.tensor([19, 0, -1, 7, 8, 13], dtype=torch.int32)
        yield Sample(args=(k, v, caches[0], caches[1], slots), name=str(dtype))


OP = register(
    Op(
        name="kv_write",
        schema=(
            "kv_write(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping) -> ()"
        ),
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 0.0, "bfloat16": 0.0},
        mutates=(2, 3),
    )
)
