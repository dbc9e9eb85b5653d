"""Predicts the throughput tests of ``h200.py`` for ways to compose steps, from times measured on an H200.

    python benchmarks/gpu_policies.py

Every step costs its products, norms and the like (by tokens), the head (by rows of logits), attention of
decoding sequences (by keys) and of prompts (by pairs), and sampling. Times are of single steps in bfloat16,
Llama-3.1-8B's shape; long runs are ``SUSTAINED`` times slower, the GPU's power being limited.
"""

from __future__ import annotations

import numpy as np

#: Tokens of a step -> milliseconds of all but attention, head and sampling.
DENSE = {1: 3.9, 128: 5.57, 256: 7.14, 384: 9.24, 512: 11.55, 1024: 21.8, 2048: 43.5, 4096: 86.5, 8192: 164.5}
HEAD_MS, HEAD_ROW_MS = 0.26, 0.49 / 512
DECODE_KEY_MS, PREFILL_PAIR_MS = 10.5 / (512 * 640), 8.2 / (15 * 512 * 513 / 2)
SAMPLE_MS, SUSTAINED = 0.11, 1.06


def dense(tokens: int) -> float:
    return float(np.interp(tokens, list(DENSE), list(DENSE.values()))) * max(1.0, tokens / max(DENSE))


def run(
    requests: int, prompt: int, answer: int, *, seats: int, budget: int, slower: float, apart: bool
) -> float:
    """Output tokens per second.

    ``slower``: what attention of decoding sequences costs in a step that has a prompt's chunk, relative to
    a step without; ``apart``: whether decoding waits while prompts fill at least half of a step.
    """
    waiting, running, total = requests, [], 0.0  # of each running: prompt tokens computed, answer tokens
    while waiting or running:
        left, keys, pairs, rows = budget, 0, 0.0, 0
        todo = sum(prompt - s[0] for s in running) + min(waiting, seats - len(running)) * prompt
        for s in running if not (apart and todo >= budget // 2) else ():
            if s[0] == prompt and left:
                left, keys, rows = left - 1, keys + prompt + s[1], rows + 1
                s[1] += 1
        before = left
        while left and ((waiting and len(running) < seats) or any(s[0] < prompt for s in running)):
            s = next((s for s in running if s[0] < prompt), None)
            if s is None:
                s, waiting = [0, 0], waiting - 1
                running.append(s)
            n = min(left, prompt - s[0])
            pairs, left = pairs + n * (s[0] + (n + 1) / 2), left - n
            s[0] += n
            if s[0] == prompt:
                s[1], rows = 1, rows + 1
        mixed = slower if left < before else 1.0
        step = dense(budget - left) + HEAD_MS + rows * HEAD_ROW_MS + keys * DECODE_KEY_MS * mixed
        total += SUSTAINED * (step + pairs * PREFILL_PAIR_MS) + SAMPLE_MS
        running = [s for s in running if s[1] < answer]
    return 1e3 * requests * answer / total


def main() -> None:
    print(
        f"{'test':<6}{'policy':<8}{'mixed attention':<17}",
        *(f"{b:>8}" for b in (1024, 2048, 4096, 8192, 16384)),
    )
    for test, shape in {"d": (512, 512, 256), "e": (1024, 128, 128)}.items():
        for apart in (False, True):
            for slower in (1.95, 1.0):
                rates = [
                    run(*shape, seats=512, budget=budget, slower=slower, apart=apart)
                    for budget in (1024, 2048, 4096, 8192, 16384)
                ]
                name = "apart" if apart else "mixed"
                print(f"{test:<6}{name:<8}x {slower:<15}", *(f"{rate:>8.0f}" for rate in rates))


if __name__ == "__main__":
    main()
