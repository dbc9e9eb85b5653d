"""What ``kernels.stage`` does, in numpy."""

from __future__ import annotations

import numpy as np

from pelton.kernels.stage.cuda import HEADER, SEGMENTS


def stage_reference(packed: np.ndarray, inputs: np.ndarray, sampled: np.ndarray, n: int, ids: int) -> None:
    """Fill ``inputs`` from ``packed``; all int32."""
    starts, shifts = packed[HEADER - 2 * SEGMENTS : HEADER].reshape(2, SEGMENTS)
    values = packed[HEADER : HEADER + n].copy()
    waits = np.flatnonzero(values[:ids] < 0)
    values[waits] = np.maximum(sampled[-values[waits] - 1], 0)
    for i in range(n):
        inputs[i + shifts[np.flatnonzero(starts <= i)[-1]]] = values[i]
    rest = packed[HEADER + n :][: 2 * packed[0]]
    inputs[rest[0::2]] = rest[1::2]


def stage_cases(device: str) -> int:
    """Run the kernel on random steps and compare; -> how many."""
    import torch
    from tests.kernels.sampling_cases import launch

    from pelton.kernels.stage.cuda import stage_programs, stage_source

    rng = np.random.default_rng(0)
    for case, (lengths, pairs) in enumerate(
        [([7, 7, 7, 0, 4, 3, 3], 0), ([900, 900, 900, 40, 39, 39], 700), ([1, 1, 1, 2, 1, 1], 3),
         ([40, 40, 40, 41, 40, 40], 20000)]
    ):  # fmt: skip
        room = [n + int(rng.integers(0, 90)) for n in lengths]
        n = sum(lengths)
        starts = np.cumsum([0, *lengths[:-1]])
        places = np.cumsum([0, *room[:-1]])
        packed = np.zeros(HEADER + n + 2 * pairs, np.int32)
        packed[0] = pairs
        segments = packed[HEADER - 2 * SEGMENTS : HEADER]
        segments[: len(starts)] = starts
        segments[len(starts) : SEGMENTS] = np.iinfo(np.int32).max
        segments[SEGMENTS : SEGMENTS + len(starts)] = places - starts
        packed[HEADER:] = rng.integers(-9, 99, n + 2 * pairs)
        table = sum(room)
        packed[HEADER + n :: 2] = table + rng.permutation(max(1, pairs))[:pairs]
        want = np.full(table + pairs + 5, -5, np.int32)
        sampled = rng.integers(100, 200, 9).astype(np.int32)
        sampled[4] = -1  # nothing could be sampled
        tensors = {
            "packed": torch.from_numpy(packed).to(device),
            "inputs": torch.from_numpy(want.copy()).to(device),
            "sampled": torch.from_numpy(sampled).to(device),
            "n": n, "ids": lengths[0],
        }  # fmt: skip
        launch(stage_source(), (stage_programs(n, pairs),), tensors)
        stage_reference(packed, want, sampled, n, lengths[0])
        np.testing.assert_array_equal(tensors["inputs"].cpu().numpy(), want, err_msg=str(case))
    return case + 1
