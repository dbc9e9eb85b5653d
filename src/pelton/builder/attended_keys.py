"""Which keys of a text attention heeds, and by which queries: what caches of 8 bits round keys by.

The mean of the keys is what they are stored without.

A constant taken from all keys of a head takes one number from all scores of a query, which softmax does not
see (unless scores are capped before it, or a sink joins it); what is left has fewer large channels, and fp8
errs by shares.
How much an error of key j's channel d moves a softmax is p_j (1 - p_j) q_d^2 summed over queries, so that is
the weight of its value in the mean: a quarter of all weight is the first token's, whose key is unlike others.

Queries count by the same weights, for ``kv_codes.look_again``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class AttendedKeys(TorchDispatchMode):
    """While it is on, watches attention ops that read ``caches``, one a layer, each for one sequence."""

    def __init__(self, caches: list[Any]) -> None:
        super().__init__()
        self._layer = {cache.data_ptr(): layer for layer, cache in enumerate(caches)}
        self._sums: dict[int, tuple[torch.Tensor, ...]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.pelton.paged_attention.default:
            self._see(*args)
        return func(*args, **(kwargs or {}))

    def _see(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        y_scale: float | None = None,
        y_codes: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if softcap > 0 or sinks is not None:
            return
        keys, heads = int(seq_lens[0]), k_cache.shape[1]
        blocks = block_table[0, : -(-keys // k_cache.shape[2])].long()
        k_HKD = k_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :keys].float()
        q_HGQD = scale * q.float().unflatten(1, (heads, -1)).permute(1, 2, 0, 3)
        scores = q_HGQD @ k_HKD[:, None].mT
        behind = torch.arange(keys - q.shape[0], keys)[:, None] - torch.arange(keys)
        seen = (behind >= 0) & (behind < (window or keys))
        p = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        heeds = p * (1 - p)
        weight_HKD = (heeds.mT @ q_HGQD.square()).sum(1)
        gram_HDD = ((q_HGQD * heeds.sum(-1, keepdim=True)).mT @ q_HGQD).sum(1)
        found = ((weight_HKD * k_HKD).sum(1), weight_HKD.sum(1), gram_HDD)
        layer = self._layer[k_cache.data_ptr()]
        before = self._sums.get(layer, (torch.zeros(()),) * 3)
        self._sums[layer] = tuple(a + b.double() for a, b in zip(before, found, strict=True))

    def means(self) -> dict[int, torch.Tensor]:
        """By layer, (KV heads, head_dim) float32; 0 for a channel that no query looks at. Layers that cap
        their scores, or have sinks, are left out."""
        return {
            layer: torch.where(w > 0, s / w.clamp(min=1e-300), 0.0).float()
            for layer, (s, w, _) in self._sums.items()
        }

    def grams(self) -> dict[int, torch.Tensor]:
        """By layer of ``means``, the sum of q q^T, (KV heads, head_dim, head_dim)."""
        return {layer: gram for layer, (*_, gram) in self._sums.items()}


def profile(gram: torch.Tensor) -> torch.Tensor:
    """(Hkv, D, D), the sum of q q^T -> the ``queries`` of ``kv_codes.encode``: its largest component u, and
    what is left of the diagonal; in the mean 1 a channel."""
    diagonal = gram.diagonal(dim1=1, dim2=2)
    size = diagonal.mean(1, keepdim=True).clamp(min=1e-300)
    values, vectors = torch.linalg.eigh(gram / size[..., None])
    along = vectors[..., -1] * values[:, -1:].clamp(min=0).sqrt()
    return torch.cat([along, (diagonal / size - along.square()).clamp(min=0)], 1).float()
