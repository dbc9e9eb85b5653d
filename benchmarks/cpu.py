"""Pelton beside llama.cpp on one GGUF file: decode, batched decode, prefill, start.

    python benchmarks/cpu.py MODEL.gguf [--threads 2] [--rounds 5] [--json FILE]

Both engines stay loaded; rounds alternate A B A B, so that what else the machine does hits both
alike. Figures are medians over the rounds' medians; on a shared CPU only the ratio counts. Both
compute logits and no sampling. llama.cpp quantises activations to 8 bits as Pelton's ``int8`` does;
the build report's KL says what that costs.
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

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from llamacpp.peer import LlamaCpp

import pelton
from pelton.engine.batch import AttentionMetadata, InputBatch

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

    def _step(self, lens: list[tuple[int, int]], all_logits: bool) -> float:
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
        return [self._step([(n, n)], False)]

    def decode(self, sequences: int, context: int, steps: int) -> list[float]:
        for _ in range(1):
            self._step([(context, context)] * sequences, False)
        return [self._step([(1, context + i + 1)] * sequences, True) for i in range(steps)]


def time_start(command: list[str]) -> float:
    """Milliseconds from process start to exit."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()

    work = Path(tempfile.mkdtemp(prefix="pelton-bench-"))
    engine = work / "bench.engine"
    pelton.build(args.model, pelton.BuildConfig(max_batch_size=8, max_seq_len=2048), output=engine)
    ours = Pelton(engine, args.threads)
    peer = LlamaCpp(args.model, args.threads, CACHE / "llamacpp")

    tests: dict[str, tuple[Callable[[], list[float]], Callable[[], list[float]]]] = {
        "decode, batch 1": (lambda: ours.decode(1, 64, 48), lambda: peer("decode 1 64 48")),
        "decode, 8 sequences": (lambda: ours.decode(8, 64, 16), lambda: peer("decode 8 64 16")),
        "prefill, 256 tokens": (lambda: ours.prefill(256), lambda: peer("prefill 256")),
    }
    figures: dict[str, dict[str, float]] = {}
    bandwidth = max(peer("bandwidth")[0] for _ in range(3))
    weights = ours.session.config.memory.weights
    for name, (a, b) in tests.items():
        a(), b()
        a_ms, b_ms = [], []
        for _ in range(args.rounds):
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
    start_ms = statistics.median(time_start(run) for _ in range(args.rounds))

    floor_ms = weights / bandwidth / 1e6
    print(f"{args.model.name}, {args.threads} threads; read bandwidth {bandwidth:.1f} GB/s; ")
    print(f"llama.cpp: {peer.info['system'].strip()}")
    print(f"{'test':<22}{'floor':>9}{'llama.cpp':>11}{'Pelton':>9}{'ratio':>7}{'goal':>6}{'must':>6}")
    for name, f in figures.items():
        goal, must = GOALS[name]
        floor = f"{floor_ms:.2f}" if name.startswith("decode") else "-"
        print(
            f"{name:<22}{floor:>9}{f['llamacpp_ms']:>11.2f}{f['pelton_ms']:>9.2f}"
            f"{f['ratio']:>7.2f}{goal:>6}{must:>6}"
        )
    print(
        f"process start to exit, one token: Pelton {start_ms:.0f} ms; "
        f"llama.cpp loads in {peer.info['load_ms']:.0f} ms"
    )
    quality = json.loads((engine / "report.json").read_text()).get("quality")
    print(f"activations: {ours.session.config.build.activations}; quality against float32: {quality}")
    if args.json:
        record = {
            "figures": figures,
            "bandwidth_gb_s": bandwidth,
            "floor_decode_ms": floor_ms,
            "start_ms": start_ms,
        }
        record |= {"quality": quality, "threads": args.threads, "model": args.model.name}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
