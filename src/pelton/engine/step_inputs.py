"""A step's arrays and dynamic sizes under the names that plans use for them."""

from __future__ import annotations

from pelton.engine.batch import InputBatch, Int32


def step_dims(batch: InputBatch) -> dict[str, int]:
    """Value of each dynamic dimension in this step."""
    sequences = batch.groups[0].seq_lens_B.size
    return {
        "T": batch.input_ids_T.size,
        "B": sequences,
        "B+1": sequences + 1,
        "N": batch.logits_indices_N.size,
    }


def decodes(batch: InputBatch) -> bool:
    """Whether every sequence has one token in this step: row b is of sequence b."""
    ends = batch.groups[0].cu_seqlens
    return ends.size == batch.input_ids_T.size + 1 and bool((ends[1:] > ends[:-1]).all())


def step_inputs(batch: InputBatch) -> dict[str, Int32]:
    """The arrays of a step by the name of the ``input`` buffer they fill."""
    arrays = {
        "input_ids": batch.input_ids_T,
        "positions": batch.positions_T,
        "logits_indices": batch.logits_indices_N,
        "cu_seqlens": batch.groups[0].cu_seqlens,
        "seq_lens": batch.groups[0].seq_lens_B,
    }
    for index, group in enumerate(batch.groups):
        arrays[f"slot_mapping.{index}"] = group.slot_mapping_T
        arrays[f"block_table.{index}"] = group.block_table_BM
    return arrays
