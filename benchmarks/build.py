"""Wall time of ``pelton build``, from the start of the process to its end, full and fast.

    python benchmarks/build.py CHECKPOINT [--runs 3]

Runs alternate. Prints the median of each in seconds, then the stages of one run within the process.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

KINDS = {"full": [], "fast": ["--fast-build"]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    walls: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        for run in range(given.runs):
            for kind, flags in KINDS.items():
                output = Path(folder) / f"{kind}-{run}.engine"
                command = [sys.executable, "-m", "pelton", "build", str(given.checkpoint), "-o", str(output)]
                started = time.perf_counter()
                subprocess.run([*command, "--quiet", *flags], check=True)
                walls[kind].append(time.perf_counter() - started)
        for kind, seconds in walls.items():
            print(f"{kind}: {statistics.median(seconds):.2f} s ({', '.join(f'{s:.2f}' for s in seconds)})")
        _stages(given.checkpoint, Path(folder))


def _stages(checkpoint: Path, folder: Path) -> None:
    started = time.perf_counter()
    from pelton.builder.build import build
    from pelton.engine.config import BuildConfig

    print(f"imports {time.perf_counter() - started:.2f} s")
    for kind, flags in KINDS.items():
        report = build(checkpoint, BuildConfig(fast_build=bool(flags)), output=folder / f"{kind}.engine")
        assert report.machine is not None
        stages = "  ".join(f"{stage} {seconds:.2f}" for stage, seconds in report.machine.seconds.items())
        print(f"{kind} by stage, s: {stages}")


if __name__ == "__main__":
    main()
