"""Pelton beside llama.cpp on the same GGUF files: decode, batched decode, prefill, start.

    python benchmarks/cpu.py MODEL.gguf [MODEL.gguf ...] [--threads 2] [--rounds 5] [--json FILE]

Both engines stay loaded; rounds alternate A B A B, so that what else the machine does hits both
alike. Figures are medians over the rounds' medians; on a shared CPU only the ratio counts. Both
compute logits and no sampling. llama.cpp quantises activations to 8 bits as Pelton's ``int8`` does;
the build report's KL says what that costs. A floor is the weights' bytes over the machine's read
bandwidth: each decode step reads all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from llamacpp.peer import LlamaCpp

import pelton
from pelton.engine.batch import AttentionMetadata, InputBatch
from pelton.kernels import native

CACHE = Path(".cache")
GOALS = {"decode, batch 1": (0.5, 0.8), "decode, 8 sequences": (0.4, 0.6), "prefill, 256 tokens": (0.3, 0.45)}


class Pelton:
    """The same three workloads on a ``pelton.Session``."""

    def __init__(self, engine: Path, threads: int) -> None:
        self.session = pelton.Session(engine, threads=threads)
        build = self.session.config.build
        assert build.block_size is not None and build.max_seq_len is not None
        self.block_size = build.block_size
        self.columns = -(-build.max_seq_len // build.block_size)

    def _step(self, lens: list[tuple[int, int]]) -> float:
        """Run one step of (new tokens, total tokens) per sequence; milliseconds."""
        table = np.zeros((len(lens), self.columns), np.int32)
        per_sequence = 512 // self.block_size
        positions, slots, ends = [], [], []
        for b, (new, total) in enumerate(lens):
            table[b, :per_sequence] = np.arange(per_sequence) + b * per_sequence
            p = np.arange(total - new, total)
            positions.append(p)
            slots.append(table[b, p // self.block_size] * self.block_size + p % self.block_size)
            ends.append(new)
        cu = np.concatenate([[0], np.cumsum(ends)]).astype(np.int32)
        pos = np.concatenate(positions).astype(np.int32)
        meta = AttentionMetadata(
            slot_mapping_T=np.concatenate(slots).astype(np.int32),
            block_table_BM=table,
            cu_seqlens=cu,
            seq_lens_B=np.array([total for _, total in lens], np.int32),
        )
        batch = InputBatch(
            input_ids_T=(1000 + pos * 37 % 20000).astype(np.int32),
            positions_T=pos,
            groups=(meta,) * len(self.session.num_blocks),
            logits_indices_N=(cu[1:] - 1).astype(np.int32),
        )
        start = time.perf_counter()
        self.session.run(batch)
        return (time.perf_counter() - start) * 1e3

    def prefill(self, n: int) -> list[float]:
        return [self._step([(n, n)])]

    def decode(self, sequences: int, context: int, steps: int) -> list[float]:
        self._step([(context, context)] * sequences)
        return [self._step([(1, context + i + 1)] * sequences) for i in range(steps)]


def time_start(command: list[str]) -> float:
    """Milliseconds from process start to exit."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return (time.perf_counter() - start) * 1e3


def compare(model: Path, threads: int, rounds: int) -> dict[str, Any]:
    """All figures of one model."""
    engine = Path(tempfile.mkdtemp(prefix="pelton-bench-")) / "bench.engine"
    pelton.build(model, pelton.BuildConfig(max_batch_size=8, max_seq_len=2048), output=engine)
    ours = Pelton(engine, threads)
    peer = LlamaCpp(model, threads, CACHE / "llamacpp")
    tests: dict[str, tuple[Callable[[], list[float]], Callable[[], list[float]]]] = {
        "decode, batch 1": (lambda: ours.decode(1, 64, 48), lambda: peer("decode 1 64 48")),
        "decode, 8 sequences": (lambda: ours.decode(8, 64, 16), lambda: peer("decode 8 64 16")),
        "prefill, 256 tokens": (lambda: ours.prefill(256), lambda: peer("prefill 256")),
    }
    figures: dict[str, dict[str, float]] = {}
    bandwidth = max(peer("bandwidth")[0] for _ in range(3))
    floor_ms = ours.session.config.memory.weights / bandwidth / 1e6
    for name, (a, b) in tests.items():
        a(), b()
        a_ms, b_ms = [], []
        for _ in range(rounds):
            a_ms.append(statistics.median(a()))
            b_ms.append(statistics.median(b()))
        figures[name] = {
            "pelton_ms": statistics.median(a_ms),
            "llamacpp_ms": statistics.median(b_ms),
            "ratio": statistics.median(x / y for x, y in zip(a_ms, b_ms, strict=True)),
        }
    ours.session.close()
    peer.close()
    run = [sys.executable, "-m", "pelton", "run", str(engine), "Hi", "--max-tokens", "1"]
    time_start(run)
    return {
        "model": model.name,
        "threads": threads,
        "figures": figures,
        "bandwidth_gb_s": bandwidth,
        "floor_decode_ms": floor_ms,
        "start_ms": statistics.median(time_start(run) for _ in range(rounds)),
        "activations": ours.session.config.build.activations,
        "quality": json.loads((engine / "report.json").read_text()).get("quality"),
        "peer": peer.info["system"].strip(),
        "peer_load_ms": peer.info["load_ms"],
    }


def show(records: list[dict[str, Any]]) -> None:
    """One table for all models, then what does not fit into it."""
    first = records[0]
    bandwidth = max(r["bandwidth_gb_s"] for r in records)
    print(f"{first['threads']} threads ({native.cpu_level()}); read bandwidth {bandwidth:.1f} GB/s")
    print(f"llama.cpp: {first['peer']}")
    width = max(len(r["model"]) for r in records) + 2
    columns = f"{'floor':>9}{'llama.cpp':>11}{'Pelton':>9}{'ratio':>7}{'goal':>6}{'must':>6}"
    print(f"{'model':<{width}}{'test':<22}{columns}")
    for r in records:
        for name, f in r["figures"].items():
            goal, must = GOALS[name]
            floor = f"{r['floor_decode_ms']:.2f}" if name.startswith("decode") else "-"
            print(
                f"{r['model']:<{width}}{name:<22}{floor:>9}{f['llamacpp_ms']:>11.2f}{f['pelton_ms']:>9.2f}"
                f"{f['ratio']:>7.2f}{goal:>6}{must:>6}"
            )
    for r in records:
        print(
            f"{r['model']}: process start to exit, one token: Pelton {r['start_ms']:.0f} ms; "
            f"llama.cpp loads in {r['peer_load_ms']:.0f} ms"
        )
        print(f"  activations: {r['activations']}; quality against float32: {r['quality']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL.gguf")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    records = [compare(model, args.threads, args.rounds) for model in args.models]
    show(records)
    if args.json:
        args.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
