"""Weights on their way to a GPU: every byte in its place, whatever thread brings it."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pelton.engine.cuda import weights
from pelton.engine.cuda.weights import DeviceWeights
from pelton.kernels.gpu.driver import Device
from pelton.kernels.gpu.null import null_gpu


class Blobs(dict[str, np.ndarray]):
    @property
    def meta(self) -> dict[str, Any]:
        return {name: SimpleNamespace(nbytes=blob.nbytes) for name, blob in self.items()}


@pytest.mark.parametrize("cores", [1, 2, 9])
def test_all_weights_arrive(cores: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(weights, "_STAGE", 1000)
    monkeypatch.setattr(weights, "cores", lambda: cores)
    rng = np.random.default_rng(0)
    sizes = (1, 999, 1000, 1001, 5500, 64, 12345)
    for turn in range(2):
        blobs = Blobs({f"w{i}": rng.integers(0, 256, n).astype(np.uint8) for i, n in enumerate(sizes)})
        with null_gpu():
            there = DeviceWeights(blobs, [*blobs, "w1"], Device())  # type: ignore[arg-type]
            for name, blob in blobs.items():
                got = ctypes.string_at(there.addresses[name], blob.nbytes)
                assert got == blob.tobytes(), (turn, name)
            there.close()
