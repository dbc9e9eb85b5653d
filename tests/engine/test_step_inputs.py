"""What a step's sizes do not say."""

from __future__ import annotations

import numpy as np
import pytest

from pelton.engine.batch import AttentionMetadata, InputBatch
from pelton.engine.step_inputs import decodes


@pytest.mark.parametrize(
    ("queries", "expected"),
    [([1], True), ([1, 1, 1], True), ([2], False), ([1, 3], False), ([2, 0], False), ([0, 1, 2], False)],
)
def test_a_decode_step_has_one_token_of_each_sequence(queries: list[int], expected: bool) -> None:
    """As many tokens as sequences is not enough: kernels take row b for sequence b's."""
    tokens = np.zeros(sum(queries), np.int32)
    group = AttentionMetadata(
        slot_mapping_T=tokens,
        block_table_BM=np.zeros((len(queries), 1), np.int32),
        cu_seqlens=np.cumsum([0, *queries]).astype(np.int32),
        seq_lens_B=np.full(len(queries), 3, np.int32),
    )
    batch = InputBatch(
        input_ids_T=tokens, positions_T=tokens, groups=(group,), logits_indices_N=np.zeros(1, np.int32)
    )
    assert decodes(batch) is expected
