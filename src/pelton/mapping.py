"""How a model is spread over devices. One rank for now; the type is what configs carry."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mapping:
    """Rank ``rank`` of ``world_size``, with tensor- and pipeline-parallel degrees."""

    world_size: int = 1
    rank: int = 0
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
