"""Runs every CUDA tactic under compute-sanitizer: memcheck, racecheck, and a line for each tactic.

    python tools/gpu_sanitizers.py [--only cuda.linear] [--tools memcheck,racecheck] [--jobs 12]

The tactic's smallest samples, compiled as for an engine, are launched by an engine's launcher over memory
of exactly their size, so that an access beyond it is found; that it would be is tried first, with a step of
more tokens than there are. A sanitizer slows a kernel down ten to a hundred times: a few tactics share a
process, several at a time, for at most ``--timeout`` seconds; where something is found each runs again alone.
Ends with 1 where a tool found something.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SUMMARY = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (.*)")
#: cuBLASLt's kernels ("unpack" calls them too) are not ours; racecheck says much of hand-made barriers.
RACECHECK_SKIPS = ("cublaslt", "unpack")
#: Tactics that share a process: a sanitizer takes seconds to start.
_TOGETHER = 8
#: The run of a whole engine.
_ENGINE = "an engine"
#: What is run with a row too many, to see that it is found.
_CANARY, _TOO_MANY = "cuda.rms_norm", "a row too many"


def chosen_cases(per_tactic: int) -> dict[str, list[Any]]:
    """By tactic ``per_tactic`` telling cases (``telling_cases.telling``) of bfloat16 and of float32, or of
    float16 where a tactic takes nothing else."""
    from pelton.ir.op import all_ops
    from pelton.kernels import conformance_cuda, telling_cases
    from pelton.kernels.gpu.driver import Device

    sm, dtypes = Device().sm, ("bfloat16", "float32")
    every = [c for op in all_ops().values() for c in conformance_cuda.cases(op, (*dtypes, "float16"), sm=sm)]
    every = [c for c in every if c.dtype in dtypes or c.tactic.sums == "float16"]
    found: dict[tuple[str, str], list[Any]] = {}
    for case in telling_cases.telling(every, per_tactic):
        found.setdefault((case.tactic.name, case.dtype), []).append(case)
    chosen: dict[str, list[Any]] = {}
    for (name, _), cases in sorted(found.items()):
        chosen.setdefault(name, []).extend(telling_cases.evenly(cases, per_tactic))
    return chosen


def run_tactics(folder: Path, names: Sequence[str], per_tactic: int) -> None:
    """In the sanitizer's process: every chosen case of some tactics."""
    from pelton.builder.cuda_conformance import DeviceRunner
    from pelton.kernels import conformance_cuda

    known = chosen_cases(per_tactic)
    start = time.perf_counter()
    with DeviceRunner(folder, exact=True) as runner:
        print(f"device after {time.perf_counter() - start:.1f} s", flush=True)
        for name in names:
            if name == _TOO_MANY:
                case = known[_CANARY][0]
                call = conformance_cuda.call_of(case)
                runner(case, replace(call, dims={**call.dims, "T": call.dims["T"] + 1}))
                return
            for case in known[name]:
                print(f"{case} at {time.perf_counter() - start:.1f} s", flush=True)
                conformance_cuda.check(case, runner)
            print(f"CHECKED {name}: {len(known[name])} cases", flush=True)


def build_engine(folder: Path) -> None:
    """A tiny engine: what is launched besides tactics, samplers and graphs, is in it."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.builder.random_checkpoint import TINY_LLAMA, RandomCheckpoint

    import pelton

    checkpoint = RandomCheckpoint(TINY_LLAMA, quant="bfloat16")
    config = pelton.BuildConfig(target="cuda", max_batch_size=4, max_num_tokens=128)
    pelton.build(checkpoint, config, output=folder, check=False)


def run_engine(folder: Path) -> None:
    """In the sanitizer's process: requests that sample in every way, in steps with and without graphs."""
    import pelton
    from pelton.runtime.config import ExecutorConfig
    from pelton.runtime.executor import Executor
    from pelton.runtime.validation import resolve_requests

    settings = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 0.0, "logprobs": 2},
    ]
    with pelton.Session(folder, kv_blocks=16, trust=True) as session:
        executor = Executor(session, ExecutorConfig())
        for i, own in enumerate(settings):
            params = pelton.SamplingParams(max_tokens=6 + i, ignore_eos=True, seed=i, **own)
            ids = list(range(3, 5 + 3 * i))  # 57 in all: no step of cuBLASLt, whose kernels are not ours
            for request in resolve_requests(ids, params, session.config, None, str(i), 0):
                executor.add(request)
        while executor.has_work:
            assert not any(update.error for update in executor.step())
        executor.close()
    print(f"CHECKED {_ENGINE}: {len(settings)} requests", flush=True)


@dataclass(frozen=True)
class Found:
    """What a tool says of some tactics that ran in one process."""

    clean: bool
    summary: str
    checked: dict[str, str]
    """By tactic: how many cases."""


def sanitize(tool: str, folder: Path, names: Sequence[str], args: argparse.Namespace) -> Found:
    """Run ``names`` under ``tool``."""
    # That calls of the driver fail is no finding: a kernel's parameters are asked for until there is none.
    memcheck = ["--leak-check", "full", "--report-api-errors", "no"]
    options = memcheck if tool == "memcheck" else ["--racecheck-report", "analysis"]
    command = [
        args.sanitizer, "--tool", tool, *options, "--error-exitcode", "86", "--print-limit", "3",
        sys.executable, __file__, "--run", ",".join(names), "--folder", str(folder),
        "--cases", str(args.cases),
    ]  # fmt: skip
    # A process group of its own: a sanitizer that is killed leaves what it watches running.
    # The host's part by one thread: several children share the cores.
    own = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=own
    )
    try:
        output, _ = child.communicate(timeout=args.timeout)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        said = child.communicate()[0].strip().splitlines()
        return Found(False, f"did not end within {args.timeout} s; its last line: {said[-1:]}", {})
    found = SUMMARY.search(output)
    summary = found[1] if found else "no summary"
    checked = dict(re.findall(r"CHECKED (.*): (\d+ \w+)", output))
    if child.returncode == 0 and all(name in checked for name in names):
        return Found(True, summary, checked)
    lines = [line for line in output.splitlines() if "=========" in line or "Error" in line]
    said = "\n    ".join([f"{summary}, exit code {child.returncode}", *lines[:12]])
    return Found(False, said, checked)


def sanitize_each(
    tool: str, folder: Path, names: Sequence[str], args: argparse.Namespace
) -> list[tuple[str, str, bool, str]]:
    """(tool, tactic, clean, what to say) of each; one by one where together they are not clean."""
    together = sanitize(tool, folder, names, args)
    if together.clean:
        return [(tool, name, True, f"{together.checked[name]}, {together.summary}") for name in names]
    if len(names) == 1:
        return [(tool, names[0], False, together.summary)]
    return [row for name in names for row in sanitize_each(tool, folder, [name], args)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="tactics whose names contain this")
    parser.add_argument("--tools", default="memcheck,racecheck")
    parser.add_argument("--cases", type=int, default=3, help="of a tactic and type")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--sanitizer", default=shutil.which("compute-sanitizer") or "")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run == _ENGINE:
        run_engine(args.folder / "tiny.engine")
        return 0
    if args.run:
        run_tactics(args.folder, args.run.split(","), args.cases)
        return 0
    if not args.sanitizer:
        print("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    from pelton.builder.cuda_conformance import compile_cases
    from pelton.kernels.gpu.driver import Device

    cases = {name: own for name, own in chosen_cases(args.cases).items() if args.only in name}
    if not cases and args.only not in _ENGINE:
        print(f"--only {args.only}: no tactic's name has that in it", file=sys.stderr)
        return 2
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "kernels"
        compile_cases((case for own in cases.values() for case in own), Device().sm, folder)
        names = list(cases)
        if args.only in _ENGINE:
            build_engine(folder / "tiny.engine")
            names.append(_ENGINE)
        print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
        if _CANARY in cases:
            told = sanitize("memcheck", folder, [_TOO_MANY], args).summary
            if "Invalid" not in told:
                print(f"memcheck does not find an access beyond an allocation here: {told}", file=sys.stderr)
                return 2
        work = []
        for tool in args.tools.split(","):
            own = [n for n in cases if tool != "racecheck" or not any(part in n for part in RACECHECK_SKIPS)]
            groups = -(-len(own) // _TOGETHER)
            work += [(tool, own[i::groups]) for i in range(groups)]  # what is slow has like names
            if _ENGINE in names:
                work.append((tool, [_ENGINE]))
        rows = []
        with ThreadPoolExecutor(args.jobs) as pool:
            jobs = [pool.submit(sanitize_each, tool, folder, own, args) for tool, own in work]
            for job in as_completed(jobs):
                for tool, name, clean, what in job.result():
                    rows.append((tool, name, clean, what))
                    print(f"{tool:<10}{name:<36}{'clean' if clean else 'FOUND'}  {what}", flush=True)
    bad = sum(not row[2] for row in rows)
    print(f"{len(rows)} runs, {bad} not clean, {time.perf_counter() - start:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
