"""kv_write: store this step's keys and values in the paged cache. An ordered effect."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pelton.ir import kv_codes
from pelton.ir.op import Op, Sample, register


def reference(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_shift: torch.Tensor | None = None,
    k_queries: torch.Tensor | None = None,
) -> None:
    """``k``, ``v``: (T, Hkv, D), any row stride; caches: (blocks, Hkv, block_size, D).

    ``slot_mapping``: (T,) int32, slot = block * block_size + offset; -1 writes nothing. ``k_scale``,
    ``v_scale``: (Hkv,) float32, of caches of 8 bits (``kv_codes``); None: ones. ``k_shift``: (Hkv, D)
    float32, taken from the keys before. Attention needs no word of it: a query's scores all lose the same.
    ``k_queries``: (Hkv, 2 D) float32, which queries the keys meet (``kv_codes.look_again``).
    """
    keep = slot_mapping >= 0
    slots = slot_mapping[keep].long()
    block, offset = slots // k_cache.shape[2], slots % k_cache.shape[2]
    k_cache[block, :, offset] = kv_codes.encode(k[keep], k_cache.dtype, k_scale, k_shift, k_queries)
    v_cache[block, :, offset] = kv_codes.encode(v[keep], v_cache.dtype, v_scale)


def shape_rule(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_shift: torch.Tensor | None = None,
    k_queries: torch.Tensor | None = None,
) -> None:
    return None


def samples(g: torch.Generator) -> Iterator[Sample]:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        k, v = torch.randn(2, 6, 3, 64, generator=g)
        caches = torch.randn(2, 5, 3, 4, 64, generator=g).to(dtype)
        slots = torch.tensor([19, 0, -1, 7, 8, 13], dtype=torch.int32)
        yield Sample(args=(k, v, caches[0], caches[1], slots), name=str(dtype))
    for dtype in (torch.int8, torch.float8_e4m3fn):
        k, v = 3 * torch.randn(2, 6, 3, 40, generator=g)
        k[0, 0, :4] = torch.tensor([1e4, -1e4, 1e-6, 0.0])
        caches = torch.zeros(2, 5, 3, 4, 40, dtype=dtype)
        slots = torch.tensor([19, 0, -1, 7, 8, 13], dtype=torch.int32)
        scales = (torch.rand(3, generator=g) / 16 + 0.01, torch.rand(3, generator=g) / 16 + 0.01)
        yield Sample(args=(k, v, caches[0], caches[1], slots, *scales), name=f"{dtype} scaled")
        yield Sample(args=(k, v, caches[0], caches[1], slots), name=str(dtype))
        shift = torch.randn(3, 40, generator=g)
        yield Sample(args=(k, v, caches[0], caches[1], slots, *scales, shift), name=f"{dtype} shifted")
        queries = torch.randn(3, 80, generator=g).abs()
        args = (k, v, caches[0], caches[1], slots, *scales, shift, queries)
        yield Sample(args=args, name=f"{dtype} shifted, looked at again")


OP = register(
    Op(
        name="kv_write",
        schema=(
            "kv_write(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
            "Tensor? k_scale=None, Tensor? v_scale=None, Tensor? k_shift=None, Tensor? k_queries=None) -> ()"
        ),
        reference=reference,
        shape_rule=shape_rule,
        samples=samples,
        tolerance={"float32": 0.0, "bfloat16": 0.0},
        mutates=(2, 3),
    )
)
