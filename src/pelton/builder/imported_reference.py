"""The reference of an imported model: the module of ``transformers`` itself, with its own attention.

It shares neither Pelton's attention nor its caches: each sequence of the check's steps is computed from
its beginning, all of them at once, before the first step is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pelton.builder.eager import StreamedWeights
from pelton.engine.batch import InputBatch
from pelton.ir.recipe import Recipe
from pelton.ir.tensors import HostTensor
from pelton.models.transformers_import import reference_module
from pelton.models.transformers_import.model import ImportedCausalLM


class ImportedReference:
    """Logits of ``steps``, in whose batches a sequence is known by its first block."""

    def __init__(
        self,
        model: ImportedCausalLM,
        source: Callable[[str], Recipe],
        read: Callable[[str], HostTensor],
        steps: Sequence[InputBatch],
        max_seq_len: int,
    ) -> None:
        module = reference_module(model.config, max_seq_len)
        names = (*module.named_parameters(), *module.named_buffers())
        recipes = {name: source(model.stored[name]) for name, _ in names if name in model.stored}
        StreamedWeights(module, recipes, read)
        texts: dict[int, dict[int, int]] = {}
        for step in steps:
            for sequence, position, token in _tokens(step):
                texts.setdefault(sequence, {})[position] = token
        self._row = {sequence: row for row, sequence in enumerate(texts)}
        ids = torch.zeros((len(texts), max(map(len, texts.values()))), dtype=torch.long)
        for row, text in enumerate(texts.values()):
            for position, token in text.items():
                ids[row, position] = token
        # Shorter texts are padded at their end, where a causal model does not look.
        positions = torch.arange(ids.shape[1])[None].expand(ids.shape)
        with torch.inference_mode():
            self._logits: Any = module(
                input_ids=ids, position_ids=positions, use_cache=False, return_dict=True
            ).logits.float()

    def run(self, batch: InputBatch) -> npt.NDArray[np.float32]:
        """One of the steps -> logits (N, V)."""
        tokens = list(_tokens(batch))
        wanted = [tokens[i] for i in batch.logits_indices_N]
        rows = [self._logits[self._row[sequence], position] for sequence, position, _ in wanted]
        found: npt.NDArray[np.float32] = torch.stack(rows).numpy()
        return found


def _tokens(batch: InputBatch) -> list[tuple[int, int, int]]:
    """(sequence, position, token) of each packed token."""
    group = batch.groups[0]
    counts = np.diff(group.cu_seqlens)
    sequences = np.repeat(group.block_table_BM[:, 0], counts)
    return list(zip(sequences.tolist(), batch.positions_T.tolist(), batch.input_ids_T.tolist(), strict=True))
