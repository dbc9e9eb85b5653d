"""Pelton on one NVIDIA GPU at the shape of Llama-3.1-8B, beside the hardware's floor and vLLM's figures.

    python benchmarks/h200.py [--quant fp8|fp8-static|int4|...] [--head int8|int4|...] [--engine DIR]
        [--only b,c,f] [--profile [FILE]] [--json FILE]

The engine is built here from random weights (nothing is downloaded) and driven in this process, without a
tokenizer or HTTP: answers (b, d, e, f) by an executor, as requests see them; first tokens by bare steps.
Static scales of inputs (``fp8-static``) are made up, as the weights are.
Floors are bytes that must move over 4.3 TB/s, or operations over 790 TFLOP/s, measured on an H200; the peer
is vLLM 0.25.1 on such a machine. Times are wall-clock, a sampled token of each sequence on the host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import numpy as np
from gpu_profile import profiles
from gpu_serving import answer_tokens, decode_step, start
from gpu_steps import Driver
from random_llama import LLAMA_8B, Q4_K_M, RandomLlama

import pelton

#: (test, size) -> floor, vLLM, goal: milliseconds.
TABLE = {
    ("b", 1): (3.49, 4.95, 3.75),
    ("c", 128): (None, 9.6, 5.0),
    ("c", 512): (None, 15.9, 12.0),
    ("c", 2048): (37.8, 51.8, 43.0),
    ("c", 8192): (168.0, 220.0, 190.0),
    ("f", 1): (3.54, 4.99, 3.85),
    ("f", 8): (3.8, 5.30, 4.2),
    ("f", 32): (4.5, 6.35, 5.0),
    ("f", 64): (5.6, 7.68, 6.2),
    ("f", 128): (7.6, 10.6, 8.5),
    ("f", 256): (13.2, 18.0, 14.5),
}
#: The same of 8-bit weights, and of the layers' products in 4 bits (no peer was measured).
TABLES = {
    "bfloat16": TABLE,
    "fp8_row": {
        ("b", 1): (1.87, 3.47, 2.2),
        ("c", 2048): (None, None, None),
        ("f", 1): (1.91, 3.51, 2.25),
        ("f", 8): (None, 3.82, 2.7),
        ("f", 32): (None, 5.36, 3.7),
        ("f", 64): (None, 6.11, 4.8),
        ("f", 128): (None, 8.93, 7.0),
        ("f", 256): (None, 15.4, 12.5),
    },
    "int4_g128": dict.fromkeys(TABLE, (None, None, None)) | {("b", 1): (1.1, None, 1.4)},
    Q4_K_M: dict.fromkeys(TABLE, (None, None, None))
    | {("b", 1): (1.08, None, None), ("f", 1): (1.10, None, None)},
}
QUANTS = {"fp8": "fp8_row", "fp8-static": "fp8_row", "int8": "int8_row", "int4": "int4_g128"}
#: Test -> requests, tokens of a prompt, of an answer.
REQUESTS = {"d": (512, 512, 256), "e": (1024, 128, 128)}
#: By block type and test: floor, vLLM, goal: output tokens per second.
THROUGHPUT: dict[str, dict[str, tuple[int | None, int | None, int | None]]] = {
    "bfloat16": {"d": (13600, 10016, 12300), "e": (23500, 14568, 20000)},
    "fp8_row": {"d": (None, 13535, 17500), "e": (None, None, None)},
}
#: Tests whose time is taken apart by --profile.
PROFILED = [("b", 1), ("c", 2048), ("c", 8192), *(("f", n) for n in (1, 8, 32, 64, 128, 256))]
NAMES = {
    "b": "decode, batch {}, 128 in 256 out, per token",
    "c": "first token, {} in",
    "f": "decode step at 1024 tokens, batch {}",
}


def measure(
    session: pelton.Session, driver: Driver, only: set[str], table: Iterable[tuple[str, int]] = TABLE
) -> dict[tuple[str, int], float]:
    """Milliseconds by test and size."""
    found = {}
    for test, size in table:
        if test not in only:
            continue
        if test == "b":
            found[test, size] = statistics.median(answer_tokens(session, 128, 256) for _ in range(3))
        elif test == "c":
            found[test, size] = driver.milliseconds(driver.batch(size, [size], -(-size // 16)), 5)
        else:
            ms, host = decode_step(session, [1009 + 7 * (b % 8) for b in range(size)], 30)
            found[test, size] = ms
            print(f"  host time at batch {size}: median {1e6 * host.median:.0f} us, p99 {1e6 * host.p99:.0f}")
    return found


def throughput(session: pelton.Session, requests: int, prompt: int, answer: int) -> float:
    """Output tokens per second of ``requests`` that come at once, greedy, to their full length."""
    executor = start(session, [prompt] * requests, answer)
    rows, computed, times = [], [0], [time.perf_counter()]
    while executor.has_work:
        rows.append(sum(len(update.new_token_ids) for update in executor.step()))
        computed.append(executor.stats().computed_tokens)
        times.append(time.perf_counter())
    steps, seconds = len(rows) - 1, times[-1] - times[0]
    assert sum(rows) == requests * answer, rows
    host = executor.stats().host_time
    assert host is not None
    print(
        f"  {requests} requests: {steps} steps, {1e3 * seconds / steps:.2f} ms each; host time per step: "
        f"median {1e6 * host.median:.0f} us, 99 % below {1e6 * host.p99:.0f} us",
        flush=True,
    )
    # What a call submits runs until the next returns, with its tokens.
    show_steps(np.diff(computed)[:-1], np.array(rows[1:]), 1e3 * np.diff(times)[1:])
    return sum(rows) / seconds


def show_steps(tokens: np.ndarray, sampled: np.ndarray, ms: np.ndarray) -> None:
    """By kind: with prompts' chunks, decoding as many as ever, decoding fewer."""
    decodes = tokens == sampled
    most = tokens[decodes].max(initial=0)
    for name, kind in (
        ("with prompts", ~decodes),
        (f"decoding {most}", decodes & (tokens == most)),
        ("decoding fewer", decodes & (tokens < most)),
    ):
        if kind.any():
            print(
                f"    {name}: {kind.sum()} steps of {tokens[kind].mean():.0f} tokens, "
                f"{ms[kind].mean():.2f} ms each, {ms[kind].sum() / 1e3:.2f} s",
                flush=True,
            )


FIRST_TOKEN = """
import sys
sys.path.insert(0, sys.argv[2])
from gpu_serving import answer_tokens, decode_step, start
from gpu_steps import Driver, greedy
import pelton
with pelton.Session(sys.argv[1]) as session:
    driver = Driver(session)
    batch = driver.batch(128, [128], 8)
    print(session.submit(batch, greedy(batch)).tokens()[0])
"""


def first_token_seconds(engine: Path) -> float:
    """From the start of a Python process to the first token of a prompt of 128 (page cache warm)."""
    start = time.perf_counter()
    command = [sys.executable, "-c", FIRST_TOKEN, str(engine), str(Path(__file__).parent)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", type=Path)
    parser.add_argument(
        "--quant", default="bfloat16", help="fp8, fp8-static, int8, int4, a block type, q4_k_m"
    )
    parser.add_argument("--head", default="bfloat16", help="the same of the head (q4_k_m has its own)")
    parser.add_argument("--only", default="a,b,c,d,e,f")
    parser.add_argument("--deterministic", action="store_true", help="an engine of that kind")
    parser.add_argument(
        "--profile",
        type=Path,
        nargs="?",
        const=Path("benchmarks/results/h200-profile.json"),
        metavar="FILE",
        help="the slowest spans of each test, printed and kept there",
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    quant, head = QUANTS.get(args.quant, args.quant), QUANTS.get(args.head, args.head)
    table = TABLES.get(quant, dict.fromkeys(TABLE, (None, None, None)))
    kind = "-static" if (static := args.quant.endswith("-static")) else ""
    kind += "-deterministic" if args.deterministic else ""
    args.engine = args.engine or Path(f".cache/llama-8b-shape-{quant}-{head}{kind}.engine")
    if not args.engine.exists():
        args.engine.parent.mkdir(parents=True, exist_ok=True)
        config = pelton.BuildConfig(
            target="cuda",
            dtype="bfloat16",
            max_seq_len=8448,
            max_num_tokens=8192,
            max_batch_size=512,
            activations="fp8" if quant == "fp8_row" else None,
            deterministic=args.deterministic,
        )
        report = pelton.build(
            RandomLlama(LLAMA_8B, quant, head, static=static), config, output=args.engine, check=False
        )
        print(report.text(), flush=True)
    if "a" in args.only.split(","):
        seconds = statistics.median(first_token_seconds(args.engine) for _ in range(3))
        print(
            f"{'process start to first token, s':<44}{4:>8}{55:>8}{8:>8}{seconds:>9.2f}{seconds / 55:>7.2f}"
        )
    start = time.perf_counter()
    with pelton.Session(args.engine) as session:
        print(f"loaded in {time.perf_counter() - start:.1f} s", flush=True)
        driver = Driver(session)
        found = measure(session, driver, set(args.only.split(",")), table)
        print(f"{'test':<44}{'floor':>8}{'vLLM':>8}{'goal':>8}{'Pelton':>9}{'/vLLM':>7}")
        for key, ms in found.items():
            floor, peer, goal = table[key]
            name, ratio = NAMES[key[0]].format(key[1]), f"{ms / peer:.2f}" if peer else ""
            print(f"{name:<44}{floor or '':>8}{peer or '':>8}{goal or '':>8}{ms:>9.2f}{ratio:>7}", flush=True)
        rates = {}
        for test, (requests, prompt, answer) in REQUESTS.items():
            if test in args.only.split(","):
                floor, peer, goal = THROUGHPUT.get(quant, {}).get(test, (None, None, None))
                throughput(session, 16, 64, 64)  # loads kernels
                rates[test] = rate = throughput(session, requests, prompt, answer)
                name, ratio = f"{requests} requests, {prompt} in {answer} out, tok/s", ""
                if peer:
                    ratio = f"{rate / peer:.2f}"
                print(
                    f"{name:<44}{floor or '':>8}{peer or '':>8}{goal or '':>8}{rate:>9.0f}{ratio:>7}",
                    flush=True,
                )
        if args.profile is not None:
            spans = profiles(driver, [test for test in PROFILED if test in found], found)
            args.profile.write_text(json.dumps(spans, indent=1) + "\n")
    if args.json:
        rows: list[dict[str, object]] = [
            {"test": t, "size": s, "ms": round(ms, 3)} for (t, s), ms in found.items()
        ]
        rows += [{"test": t, "tokens_per_second": round(rate)} for t, rate in rates.items()]
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
