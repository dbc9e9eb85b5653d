"""What is checked of a run's next step, of which not everything is looked at again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pelton.engine.batch import AttentionMetadata, DecodeRun, InputBatch
from pelton.engine.validate import BatchChecker
from tests.runtime.fakes import fake_config

BLOCKS = 6


def checker() -> BatchChecker:
    return BatchChecker(fake_config(block_size=4, max_seq_len=16), (BLOCKS,), 8)


def step(run: DecodeRun | None, positions: list[int], **group: Any) -> InputBatch:
    """Two sequences, in blocks 0 to 3 and 2 to 5."""
    positions_B = np.array(positions, np.int32)
    table = np.array([[0, 1, 2, 3], [2, 3, 4, 5]], np.int32)
    given = {
        "slot_mapping_T": table[[0, 1], positions_B // 4 % 4] * np.int32(4) + positions_B % np.int32(4),
        "block_table_BM": table,
        "cu_seqlens": np.arange(3, dtype=np.int32),
        "seq_lens_B": positions_B + np.int32(1),
    }
    return InputBatch(
        input_ids_T=np.array([-1, -2], np.int32),
        positions_T=positions_B,
        groups=(AttentionMetadata(**(given | group)),),
        logits_indices_N=np.arange(2, dtype=np.int32),
        run=run,
    )


@pytest.mark.parametrize(
    ("positions", "group", "message"),
    [
        ([4, 15], {"seq_lens_B": np.array([5, 17], np.int32)}, r"seq_lens must lie in 0\.\.16"),
        ([4, 16], {"slot_mapping_T": np.array([4, 5], np.int32)}, r"positions must lie in 0\.\.15"),
        ([4, 9], {"slot_mapping_T": np.array([4, 24], np.int32)}, r"slot_mapping\.0 must lie in 0\.\.23"),
        ([4, 9], {"slot_mapping_T": np.array([4, -1], np.int32)}, r"slot_mapping\.0 must lie in 0\.\.23"),
        ([4, 9], {"slot_mapping_T": np.array([4], np.int32)}, "slot_mapping.0 must be contiguous int32"),
        ([4, 9], {"seq_lens_B": np.array([5, 10], np.int64)}, "seq_lens must be contiguous int32"),
    ],
)
def test_a_next_step_that_would_reach_beyond_is_refused(
    positions: list[int], group: dict[str, Any], message: str
) -> None:
    run, checks = DecodeRun(), checker()
    checks.check(step(run, [3, 8]), unsampled=True)
    checks.check(step(run, [4, 9]), unsampled=True)
    with pytest.raises(ValueError, match=message):
        checks.check(step(run, positions, **group), unsampled=True)


@pytest.mark.parametrize("between", [None, DecodeRun()])
def test_a_step_of_another_run_is_checked_whole(between: DecodeRun | None) -> None:
    run, checks = DecodeRun(), checker()
    bad = np.array([[0, 1, 2, 3], [2, 3, BLOCKS, 5]], np.int32)
    checks.check(step(run, [3, 8]), unsampled=True)
    checks.check(step(run, [4, 9], block_table_BM=bad), unsampled=True)  # it is not read from there
    checks.check(step(between, [4, 9]), unsampled=True)
    with pytest.raises(ValueError, match="block_table"):
        checks.check(step(run, [5, 10], block_table_BM=bad), unsampled=True)
    with pytest.raises(ValueError, match="block_table"):  # one that was refused begins no run
        checks.check(replace(step(run, [5, 10], block_table_BM=bad)), unsampled=True)
