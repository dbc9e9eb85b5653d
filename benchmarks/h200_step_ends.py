"""What a decode step of one sequence costs at its ends: inputs, embedding, sampling, gaps between steps.

    python benchmarks/h200_step_ends.py [--quant int4_g128,bfloat16] [--layers 4] [--context 256]

An engine of Llama-3.1-8B's shape with few layers, so that ends are a larger share of a step. Steps without
one part after another, microseconds: ``in one graph`` of eight steps, so without what lies between launches;
``launched`` one after another without waiting; and as an executor's request sees them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from gpu_serving import answer_tokens
from gpu_steps import Driver, greedy
from random_llama import LLAMA_8B, RandomLlama

import pelton
from pelton.kernels.gpu.driver import Event, Memory, capture

STEPS = 8
DIMS = {"T": 1, "B": 1, "B+1": 2, "N": 1}


class Parts:
    """Of a decode step of one sequence of ``context`` tokens: what puts each into the stream."""

    def __init__(self, session: pelton.Session, context: int) -> None:
        driver = Driver(session)
        per = -(-(context + 1) // 16)
        for new, total in ((context - 1, context - 1), (1, context), (1, context)):
            batch = driver.batch(new, [total], per)
            session.submit(batch, greedy(batch)).tokens()
        self.runner: Any = session._runner
        self.stream = self.runner._stream
        self.names = [i.op for i in self.runner._plan.instructions][self.runner._network]
        self.stage = lambda: self.runner._stage.run(self.stream, 1)
        sampler = self.runner._sampler
        self.scan = lambda: sampler._scan.run(self.stream, *sampler._scan._launched[:2], dependent=True)

    def plan(self, without: tuple[str, ...] = (), only: str | None = None) -> Callable[[], None]:
        """What puts the plan's instructions into the stream."""

        def run() -> None:
            for i, name in enumerate(self.names):
                if name not in without and only in (None, name):
                    self.runner._launcher.run(self.stream, DIMS, decodes=True, which=slice(i, i + 1))

        return run

    def graph_of(self, *parts: Callable[[], None], steps: int = STEPS) -> Any:
        with capture(self.stream) as captured:
            for _ in range(steps):
                for part in parts:
                    part()
        return captured.graph

    def timed(self, launch: Callable[[], None], steps: int, turns: int = 24) -> tuple[float, float]:
        a, b = Event(timing=True), Event(timing=True)
        times = []
        for _ in range(turns):
            launch()  # so that the stream is busy while the host launches what is timed
            a.record(self.stream)
            launch()
            b.record(self.stream)
            b.wait()
            times.append(1e3 * b.milliseconds_since(a) / steps)
        a.close(), b.close()
        return min(times), statistics.median(times)

    def in_one_graph(self, *parts: Callable[[], None], steps: int = STEPS) -> tuple[float, float]:
        graph = self.graph_of(*parts, steps=steps)
        found = self.timed(lambda: graph.launch(self.stream), steps)
        graph.close()
        return found


def say(name: str, found: tuple[float, float], base: float = 0.0) -> None:
    more = f"   {found[0] - base:+7.2f} beyond the chain" if base else ""
    print(f"  {name:<62} {found[0]:8.2f} {found[1]:8.2f}{more}", flush=True)


def measure(session: pelton.Session, context: int) -> None:
    p = Parts(session, context)
    print("  instructions:", " ".join(p.names[:4]), "..", " ".join(p.names[-6:]))
    ends = ("embedding", "rope_cos_sin", "to_float32")
    chain = p.in_one_graph(p.plan(ends))
    base = chain[0]
    say("in one graph: products, attention, head (min, median)", chain)
    for left in ends[:2]:
        say(f"with {left}", p.in_one_graph(p.plan(tuple(e for e in ends if e != left))), base)
    whole = p.plan(("to_float32",))
    say("whole plan", p.in_one_graph(whole), base)
    say("whole plan, scan", p.in_one_graph(whole, p.scan), base)
    say("stage, whole plan", p.in_one_graph(p.stage, whole), base)
    say("stage, whole plan, scan", p.in_one_graph(p.stage, whole, p.scan), base)
    one = p.graph_of(whole, steps=1)
    event = Event()
    graph = lambda: one.launch(p.stream)
    record = lambda: event.record(p.stream)

    def several(*parts: Callable[[], None]) -> tuple[float, float]:
        def launch() -> None:
            for _ in range(STEPS):
                for part in parts:
                    part()

        return p.timed(launch, STEPS)

    say("launched: graph of the whole plan", several(graph), base)
    say("launched: graph, event", several(graph, record), base)
    say("launched: graph, scan", several(graph, p.scan), base)
    say("launched: stage, graph", several(p.stage, graph), base)
    say("launched: stage, graph, scan", several(p.stage, graph, p.scan), base)
    say("launched: stage, graph, scan, event", several(p.stage, graph, p.scan, record), base)
    both = p.graph_of(p.stage, whole, p.scan, steps=1)
    say(
        "launched: a graph of stage, whole plan, scan; event",
        several(lambda: both.launch(p.stream), record),
        base,
    )
    packed = p.runner._inputs._packed
    host, there = packed.value, Memory(p.runner._inputs.nbytes)
    p.stream.copy_in(there.address, host, there.nbytes)
    for what, where in (("the device's memory", there.address), ("the host's", host)):
        packed.value = where
        say(f"alone, 64 in a graph: stage from {what}", p.in_one_graph(p.stage, steps=64))
    there.close()
    for name, part in (("scan", p.scan), *((e, p.plan(only=e)) for e in ends[:2])):
        say(f"alone, 64 in a graph: {name}", p.in_one_graph(part, steps=64))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quant", default="int4_g128")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=256)
    args = parser.parse_args()
    for quant in args.quant.split(","):
        with tempfile.TemporaryDirectory() as folder:
            path, begin = Path(folder) / "few.engine", time.perf_counter()
            config = pelton.BuildConfig(
                target="cuda", dtype="bfloat16", max_seq_len=1024, max_num_tokens=512, max_batch_size=16
            )
            shape = LLAMA_8B | {"num_hidden_layers": args.layers}
            pelton.build(RandomLlama(shape, quant), config, output=path, check=False)
            print(f"{quant}, {args.layers} layers, built in {time.perf_counter() - begin:.1f} s", flush=True)
            with pelton.Session(path, gpu_memory_fraction=0.2) as session:
                answers = sorted(1e3 * answer_tokens(session, 128, 256) for _ in range(5))
                print("  a request's token (128 in, 256 out):", " ".join(f"{a:.2f}" for a in answers), "us")
                measure(session, args.context)


if __name__ == "__main__":
    main()
