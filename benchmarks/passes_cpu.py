"""What each pass is worth: engines of one model with one pass off, beside the engine with all of them.

    python benchmarks/passes_cpu.py MODEL.gguf [--threads 2] [--rounds 5] [--pass NAME ...]

Only passes that change something in the model are switched off; the others are listed. Both engines are
loaded in this process and take turns (A B A B), so that what else the machine does hits both alike. A
figure is the median over rounds of (time without the pass / time with all) - 1: what leaving it out costs.
Tactics are chosen by default, not by timing, so that both sides run the same kernels but for the pass.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from cpu import Pelton

import pelton
from pelton.builder.build import build
from pelton.builder.report import BuildReport
from pelton.engine.artifact import open_engine

WORKLOADS: dict[str, Callable[[Pelton], list[float]]] = {
    "decode": lambda p: p.decode(1, 64, 12),
    "batch 8": lambda p: p.decode(8, 64, 4),
    "prefill 256": lambda p: p.prefill(256),
}


def make(model: Path, output: Path, off: Sequence[str] = ()) -> BuildReport:
    """The engine without the passes ``off``."""
    modes = dict.fromkeys(off, "off")
    config = pelton.BuildConfig(max_batch_size=8, max_seq_len=2048, timing=False, passes=modes)
    return build(model, config, output=output, check=False)


def compare(whole: Pelton, other: Pelton, rounds: int) -> list[float]:
    """What the other engine takes more, by workload: 0.1 is 10 %."""
    costs = []
    for work in WORKLOADS.values():
        ratios = []
        for _ in range(rounds + 1):
            a, b = statistics.median(work(whole)), statistics.median(work(other))
            ratios.append(b / a)
        costs.append(statistics.median(ratios[1:]) - 1)  # the first round warms both up
    return costs


def sizes(engine: Path) -> tuple[int, int]:
    """(instructions, bytes of weights) of an engine."""
    opened = open_engine(engine)
    return len(opened.plan.instructions), opened.config.memory.weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pass", dest="names", action="append", help="only these passes (repeatable)")
    args = parser.parse_args()

    work = Path(tempfile.mkdtemp(prefix="pelton-passes-"))
    report = make(args.model, work / "all.engine")
    changed = {p.name: p.changed for p in report.passes if p.changed}
    whole = Pelton(work / "all.engine", args.threads)
    absolute = [statistics.median(run(whole) + run(whole)) for run in WORKLOADS.values()]
    cases = {name: (name,) for name in changed if not args.names or name in args.names}
    if not args.names:
        cases["all of these"] = tuple(changed)

    print(f"{args.model.name}, {args.threads} threads, {args.rounds} rounds; times without the pass")
    print(f"| pass | places | instructions | weights MB | {' | '.join(WORKLOADS)} |")
    print("|" + "---|" * (4 + len(WORKLOADS)))
    instructions, nbytes = sizes(work / "all.engine")
    times = " | ".join(f"{ms:.2f} ms" for ms in absolute)
    print(f"| all on | | {instructions} | {nbytes / 1e6:.1f} | {times} |", flush=True)
    for name, off in cases.items():
        folder = work / f"{name.replace(' ', '-')}.engine"
        make(args.model, folder, off)
        other = Pelton(folder, args.threads)
        costs = " | ".join(f"{cost:+.1%}" for cost in compare(whole, other, args.rounds))
        other.session.close()
        more, nbytes = sizes(folder)
        places = changed.get(name, "")
        print(f"| {name} | {places} | {more} | {nbytes / 1e6:.1f} | {costs} |", flush=True)
        shutil.rmtree(folder)
    idle = [p.name for p in report.passes if not p.changed]
    print(f"Nothing to change in this model: {', '.join(idle)}.")
    whole.session.close()
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
