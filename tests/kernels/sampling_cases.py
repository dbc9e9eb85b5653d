"""Runs the GPU sampler's kernels on tensors, for tests in the interpreter and on a GPU."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch

from pelton.kernels.launch import KernelSource
from pelton.kernels.sampling import reference
from pelton.kernels.sampling.cuda import Pieces, sampler_sources


def launch(source: KernelSource, grid: tuple[int, ...], tensors: dict[str, Any]) -> None:
    kernel = getattr(importlib.import_module(source.module), source.function)
    arguments = [tensors[name] for name, _ in source.types]
    kernel[grid](*arguments, **dict(source.constants), num_warps=source.num_warps)


def sample(logits: np.ndarray, device: str, pieces: Pieces | None = None, **params: np.ndarray) -> np.ndarray:
    """Tokens of each row, by ``temperature``, ``top_k``, ``top_p``, ``min_p`` and ``uniform`` (N,)."""
    n, vocab = logits.shape
    sources, pieces = sampler_sources(vocab), Pieces.of(vocab)
    tensors: dict[str, Any] = {
        "logits": torch.from_numpy(logits).to(device),
        **{k: torch.from_numpy(v).to(device) for k, v in params.items()},
    }
    shapes = {
        "part_max": (torch.float32, pieces.count),
        "part_at": (torch.int32, pieces.count),
        "part_sum": (torch.float32, pieces.count),
        "part_count": (torch.int32, pieces.count),
        "part_reach": (torch.float32, pieces.count),
        "candidate": (torch.float32, pieces.count * pieces.room),
        "candidate_at": (torch.int32, pieces.count * pieces.room),
        "tokens": (torch.int32, 1),
        "tokens_host": (torch.int32, 1),
    }
    for name, (dtype, width) in shapes.items():
        tensors[name] = torch.full((n, width), -7, dtype=dtype, device=device)
    launch(sources["scan"], (n, pieces.count), tensors)
    launch(sources["weigh"], (n, pieces.count), tensors)
    launch(sources["choose"], (n,), tensors)
    assert torch.equal(tensors["tokens"], tensors["tokens_host"])
    tokens: np.ndarray = tensors["tokens"].cpu().numpy()[:, 0]
    return tokens


#: (name, temperature, top_k, top_p, min_p)
PARAMETERS = [
    ("greedy", 0.0, 0, 1.0, 0.0),
    ("temperature", 0.8, 0, 1.0, 0.0),
    ("hot", 3.0, 0, 1.0, 0.0),
    ("top_k", 1.0, 7, 1.0, 0.0),
    ("top_k of all", 1.0, 100000, 1.0, 0.0),
    ("top_p", 0.7, 0, 0.9, 0.0),
    ("small top_p", 1.0, 0, 0.01, 0.0),
    ("large top_p", 2.0, 0, 0.9999, 0.0),
    ("min_p", 1.0, 0, 1.0, 0.1),
    ("all", 1.3, 40, 0.8, 0.02),
]


def logits_of(kind: str, n: int, vocab: int) -> np.ndarray:
    """Rows as models give them (``peaked``), flat ones (too many candidates), many equal ones."""
    rng = np.random.default_rng(len(kind) * 1000 + vocab)
    normal = rng.standard_normal((n, vocab), dtype=np.float32)
    if kind == "flat":
        return normal * np.float32(0.5)
    if kind == "ties":
        return np.round(normal * 2).astype(np.float32)
    rows = normal * np.float32(3)
    rows[np.arange(n), rng.integers(0, vocab, n)] += 9
    return rows


def check(device: str, vocab: int, kinds: tuple[str, ...] = ("peaked", "flat", "ties"), n: int = 6) -> int:
    """Compare with ``reference``; a token may differ only where the draw lies at a boundary of its range."""
    checked = 0
    for kind in kinds:
        logits = logits_of(kind, n, vocab)
        for name, t, k, p, m in PARAMETERS:
            seeds, positions = np.arange(n, dtype=np.uint64), np.arange(n, dtype=np.int64) * 3
            u = reference.uniforms(seeds, positions)
            got = sample(
                logits,
                device,
                temperature=np.full(n, t, np.float32),
                top_k=np.full(n, k, np.int32),
                top_p=np.full(n, p, np.float32),
                min_p=np.full(n, m, np.float32),
                uniform=u.astype(np.float32),
            )
            want, _ = reference.sample(
                logits, [t] * n, [k] * n, [p] * n, [m] * n, seeds, positions, want_logprobs=False
            )
            for i in range(n):
                if got[i] != want[i] and t > 0:
                    limits = k, float(np.float32(p)), float(np.float32(m))
                    near = {
                        reference._choose(logits[i], np.float32(t), *limits, float(np.clip(u[i] + d, 0, 1)))
                        for d in (-2e-5, 2e-5)
                    }
                    assert got[i] in near, (kind, name, i, int(got[i]), int(want[i]))
                else:
                    assert got[i] == want[i], (kind, name, i, int(got[i]), int(want[i]))
                checked += 1
    broken = logits_of("peaked", 4, vocab)
    broken[0, 3], broken[1, vocab - 1], broken[2] = np.nan, np.inf, -np.inf
    ones = np.ones(4, np.float32)
    got = sample(broken, device, temperature=ones, top_k=np.zeros(4, np.int32), top_p=ones * 0.9,
                 min_p=ones * 0, uniform=ones * 0.5)  # fmt: skip
    assert got[:3].tolist() == [-1, -1, -2]
    assert got[3] >= 0
    return checked
