"""What each pass is worth: engines of one model with one pass off, beside the engine with all of them.

    python benchmarks/passes_cpu.py MODEL.gguf [--threads 2] [--rounds 5] [--pass NAME ...]

Only passes that change something in the model are switched off; the others are listed. Tactics are chosen
by default, not by timing, so that both sides run the same kernels but for the pass.

Both engines are loaded in this process and take turns step by step (A B A B), so that what else the
machine does hits both alike. How an engine's pages happen to lie in memory moves its times by several
percent, so each round copies both engines anew (to memory, where there is /dev/shm). A figure is the median
over rounds of (time without the pass / time with all) - 1, and the least and most of the rounds; the row
"nothing" compares the engine with itself: so much is noise.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from cpu import Pelton

import pelton
from pelton.builder.build import build
from pelton.builder.report import BuildReport
from pelton.engine.artifact import open_engine

#: Workload -> (new tokens, total tokens) of each sequence of a step, and how often both engines run it.
WORKLOADS: dict[str, tuple[list[tuple[int, int]], int]] = {
    "decode": ([(1, 65)], 24),
    "batch 8": ([(1, 65)] * 8, 16),
    "prefill 256": ([(256, 256)], 3),
}


def make(model: Path, output: Path, off: Sequence[str] = ()) -> BuildReport:
    """The engine without the passes ``off``."""
    modes = dict.fromkeys(off, "off")
    config = pelton.BuildConfig(max_batch_size=8, max_seq_len=2048, timing=False, passes=modes)
    return build(model, config, output=output, check=False)


def load(engine: Path, threads: int) -> Pelton:
    """A copy of the engine, its cache filled so that single steps can be repeated."""
    copy = engine.with_name(f"{engine.name}.copy")
    shutil.copytree(engine, copy)
    loaded = Pelton(copy, threads)
    shutil.rmtree(copy)  # the mapping keeps it
    loaded.decode(8, 64, 1)
    return loaded


def compare(whole: Path, other: Path, threads: int) -> list[float]:
    """What the other engine takes more, by workload: 0.1 is 10 %."""
    a, b = load(whole, threads), load(other, threads)
    costs = []
    for lens, times in WORKLOADS.values():
        pairs = [(a._step(lens), b._step(lens)) for _ in range(times)]
        costs.append(statistics.median(y / x for x, y in pairs) - 1)
    a.session.close()
    b.session.close()
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pass", dest="names", action="append", help="only these passes (repeatable)")
    args = parser.parse_args()

    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    work = Path(tempfile.mkdtemp(prefix="pelton-passes-", dir=memory))
    try:
        whole = work / "all.engine"
        report = make(args.model, whole)
        changed = {p.name: p.changed for p in report.passes if p.changed}
        cases: dict[str, tuple[str, ...]] = {"nothing": ()}
        cases |= {name: (name,) for name in changed if not args.names or name in args.names}
        if not args.names:
            cases["all of these"] = tuple(changed)
        engines = {name: work / f"{name.replace(' ', '-')}.engine" for name in cases}
        for name, off in cases.items():
            make(args.model, engines[name], off)
        costs: dict[str, list[list[float]]] = {name: [] for name in cases}
        for _ in range(args.rounds):
            for name, engine in engines.items():
                costs[name].append(compare(whole, engine, args.threads))
        loaded = load(whole, args.threads)
        times = [statistics.median(loaded._step(lens) for _ in range(n)) for lens, n in WORKLOADS.values()]
        loaded.session.close()

        print(f"{args.model.name}, {args.threads} threads, {args.rounds} rounds")
        print(f"| without | places | instructions | weights MB | {' | '.join(WORKLOADS)} |")
        print("|" + "---|" * (4 + len(WORKLOADS)))
        rows = {"(all passes on)": [f"{ms:.2f} ms" for ms in times]}
        rows |= {name: [_figure(list(column)) for column in zip(*costs[name], strict=True)] for name in cases}
        for name, figures in rows.items():
            opened = open_engine(engines.get(name, whole))
            size = f"{len(opened.plan.instructions)} | {opened.config.memory.weights / 1e6:.1f}"
            print(f"| {name} | {changed.get(name, '')} | {size} | {' | '.join(figures)} |")
        idle = [p.name for p in report.passes if not p.changed]
        print(f"Nothing to change in this model: {', '.join(idle)}.")
    finally:
        shutil.rmtree(work)


def _figure(ratios: list[float]) -> str:
    low, high = min(ratios), max(ratios)
    return f"{statistics.median(ratios):+.1%} ({low * 100:+.0f} to {high * 100:+.0f})"


if __name__ == "__main__":
    main()
