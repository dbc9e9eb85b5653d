"""What a GPU session sends of a step: all inputs in place, padded, and of block tables only what changed."""

from __future__ import annotations

import ctypes as C
import itertools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pelton.engine.batch import AttentionMetadata, DecodeRun, InputBatch
from pelton.engine.cuda.inputs import DeviceInputs
from pelton.engine.step_inputs import decodes, step_dims, step_inputs
from pelton.kernels.gpu.driver import PinnedMemory, Stream
from pelton.kernels.gpu.null import null_gpu
from tests.kernels.stage_reference import stage_reference

COLUMNS, PAGE, TOKENS, SEQUENCES = 9, 4, 24, 6


def plan(groups: int) -> Any:
    shapes: dict[str, tuple[object, ...]] = {"input_ids": ("T",), "positions": ("T",)}
    for g in range(groups):
        shapes |= {f"slot_mapping.{g}": ("T",), f"block_table.{g}": ("B", COLUMNS)}
    shapes |= {"cu_seqlens": ("B+1",), "seq_lens": ("B",), "logits_indices": ("N",)}
    buffers = [SimpleNamespace(name=n, kind="input", shape=s) for n, s in shapes.items()]
    return SimpleNamespace(buffers=buffers, dims={"T": TOKENS, "B": SEQUENCES, "N": SEQUENCES})


class Kernel:
    """Stands for the kernel: lays out by the reference, in memory that is the host's."""

    def bind(self, values: list[Any]) -> None:
        self._values = values

    def run(self, stream: object, programs: int) -> None:
        packed, inputs, sampled, n, ids = (v.value for v in self._values[:5])
        host, device = (np.ctypeslib.as_array((C.c_int32 * 512).from_address(a)) for a in (packed, inputs))
        tokens = np.ctypeslib.as_array((C.c_int32 * SEQUENCES).from_address(sampled))
        stage_reference(host, device, tokens, n, ids, self._values[5])
        self.pairs = host[0]


class Device:
    def __init__(self, groups: int) -> None:
        self.inputs = DeviceInputs(plan(groups), PAGE)
        self.kernel, self.stream = Kernel(), Stream()
        self.sampled = PinnedMemory(4 * SEQUENCES)
        self.hosts = itertools.cycle([PinnedMemory(self.inputs.nbytes) for _ in range(2)])
        self.inputs.clear(self.stream)
        self.inputs.bind(self.kernel, self.sampled.address)  # type: ignore[arg-type]

    def stage(self, batch: InputBatch, dims: dict[str, int] | None = None) -> int:
        """-> entries of block tables that were sent."""
        sizes, host = dims or step_dims(batch), next(self.hosts)
        self.inputs.stage(batch, sizes, host, decode=decodes(batch))
        self.inputs.lay_out(sizes, host, self.stream)
        return int(self.kernel.pairs)

    def there(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        address = self.inputs.addresses[name]
        return np.ctypeslib.as_array((C.c_int32 * int(np.prod(shape))).from_address(address)).reshape(shape)

    def holds(self, batch: InputBatch) -> None:
        """Of block tables what each sequence has: what lies beyond is never attended to."""
        used = -(-batch.groups[0].seq_lens_B[:, None] // PAGE) > np.arange(COLUMNS)
        for name, array in step_inputs(batch).items():
            there = self.there(name, array.shape)
            if array.ndim == 2:
                there, array = there * used, array * used
            np.testing.assert_array_equal(there, array, err_msg=name)


@pytest.fixture(params=[1, 2])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with null_gpu():
        yield Device(request.param)


def batch_of(counts: list[int], lens: list[int], tables: list[np.ndarray], seed: int = 0) -> InputBatch:
    rng = np.random.default_rng(seed)
    cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    total = int(cu[-1])
    groups = tuple(
        AttentionMetadata(
            slot_mapping_T=rng.integers(0, 99, total).astype(np.int32),
            block_table_BM=table,
            cu_seqlens=cu,
            seq_lens_B=np.array(lens, np.int32),
        )
        for table in tables
    )
    return InputBatch(
        input_ids_T=rng.integers(0, 99, total).astype(np.int32),
        positions_T=rng.integers(0, 30, total).astype(np.int32),
        groups=groups,
        logits_indices_N=cu[1:] - 1,
    )


def tables_of(device: Device, rows: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 99, (rows, COLUMNS)).astype(np.int32) for _ in device.inputs._tables]


def test_every_input_reaches_its_place(device: Device) -> None:
    for seed, counts in enumerate(([5, 1, 9], [1, 1], [24], [3])):
        lens = [c + 2 * seed for c in counts]
        batch = batch_of(counts, lens, tables_of(device, len(counts), seed), seed)
        device.stage(batch)
        device.holds(batch)


def test_only_changed_entries_of_block_tables_are_sent(device: Device) -> None:
    tables, groups = tables_of(device, 3), len(device.inputs._tables)
    columns = -(-17 // PAGE)
    assert device.stage(batch_of([1, 1, 1], [9, 17, 4], tables)) == groups * 3 * columns
    assert device.stage(batch_of([1, 1, 1], [10, 18, 5], tables)) == 0
    for table in tables:
        table[1, 2] += 1
    batch = batch_of([1, 1, 1], [11, 19, 6], tables)
    assert device.stage(batch) == groups
    device.holds(batch)
    # One more column comes into use, of one sequence.
    longer = batch_of([1, 1, 1], [12, 21, 7], tables)
    assert device.stage(longer) == groups * 3
    device.holds(longer)


def test_a_step_is_padded_up_to_a_graph(device: Device) -> None:
    batch = batch_of([1, 1, 1], [9, 17, 4], tables_of(device, 3))
    device.stage(batch, {"T": 5, "B": 5, "B+1": 6, "N": 5})
    device.holds(batch)
    assert device.there("cu_seqlens", (6,)).tolist() == [0, 1, 2, 3, 4, 5]
    assert device.there("seq_lens", (5,)).tolist() == [9, 17, 4, 0, 0], "padded sequences have no keys"
    assert device.there("slot_mapping.0", (5,))[3:].tolist() == [-1, -1], "and write none"


def test_a_step_with_prompts_is_padded_with_sequences_of_no_tokens(device: Device) -> None:
    batch = batch_of([3, 1], [9, 4], tables_of(device, 2))
    device.stage(batch, {"T": 6, "B": 4, "B+1": 5, "N": 4})
    device.holds(batch)
    assert device.there("cu_seqlens", (5,)).tolist() == [0, 3, 4, 4, 4]
    assert device.there("seq_lens", (4,)).tolist() == [9, 4, 0, 0]
    assert device.there("slot_mapping.0", (6,))[4:].tolist() == [-1, -1], "padded tokens write nothing"
    assert device.there("logits_indices", (4,)).tolist() == [2, 3, 0, 0]


def test_placeholders_become_what_the_step_before_sampled(device: Device) -> None:
    device.sampled.array(np.int32)[:] = [70, 71, 72, 73, 74, 75]
    batch = batch_of([2, 1, 1], [9, 17, 4], tables_of(device, 3))
    batch.input_ids_T[:] = [-3, 8, -1, -6]
    device.stage(batch)
    assert device.there("input_ids", (4,)).tolist() == [72, 8, 70, 75]


def run_of(device: Device, lens: list[int], steps: int) -> Iterator[InputBatch]:
    """Decode steps of one run: tables grow where a token begins a block."""
    run, count, rng = DecodeRun(), len(lens), np.random.default_rng(5)
    tables = [np.zeros((count, COLUMNS), np.int32) for _ in device.inputs._tables]
    cu = np.arange(count + 1, dtype=np.int32)
    for b, n in enumerate(lens):
        for table in tables:
            table[b, : -(-n // PAGE)] = rng.integers(1, 99, -(-n // PAGE))
    for step in range(steps):
        positions = np.array(lens, np.int32) + np.int32(step)
        for table in tables:
            new = np.flatnonzero(positions % PAGE == 0)
            table[new, positions[new] // PAGE] = rng.integers(1, 99, len(new))
        slots = [t[np.arange(count), positions // PAGE] * PAGE + positions % PAGE for t in tables]
        ids = -1 - np.arange(count, dtype=np.int32) if step else np.array([5] * count, np.int32)
        groups = tuple(
            AttentionMetadata(
                slot_mapping_T=slot, block_table_BM=table, cu_seqlens=cu, seq_lens_B=positions + np.int32(1)
            )
            for slot, table in zip(slots, tables, strict=True)
        )
        yield InputBatch(
            input_ids_T=ids, positions_T=positions, groups=groups, logits_indices_N=cu[:-1], run=run
        )


def test_of_a_run_s_next_step_only_what_changes_is_written(device: Device) -> None:
    padded = {"T": 4, "B": 4, "B+1": 5, "N": 4}
    sampled, groups = device.sampled.array(np.int32), len(device.inputs._tables)
    for again in range(2):  # one run after another, of other sequences in the same rows
        for step, batch in enumerate(run_of(device, [5 + again, 8, 3], 12)):
            sampled[:] = np.arange(SEQUENCES) + 10 * step
            sent = device.stage(batch, padded)
            if step:
                assert sent == groups * int((batch.positions_T % PAGE == 0).sum())
                expected = replace(batch, input_ids_T=sampled[:3].copy())
            else:
                expected = batch
            device.holds(expected)
            assert device.there("seq_lens", (4,))[3] == 0, "padding stays"
            assert device.there("slot_mapping.0", (4,))[3] == -1
    # A step of another kind between, then the run's memory is not taken for what it was.
    other = batch_of([2, 1, 1], [9, 17, 4], tables_of(device, 3))
    device.stage(other)
    device.holds(other)


def test_a_run_interrupted_by_another_step_begins_anew(device: Device) -> None:
    steps = list(run_of(device, [5, 8], 9))
    sampled = device.sampled.array(np.int32)
    for i, batch in enumerate(steps):
        if i == 5:
            device.stage(batch_of([3, 1], [9, 17], tables_of(device, 2)))
        device.stage(batch)
        device.holds(replace(batch, input_ids_T=sampled[:2].copy()) if i else batch)
