"""The products of a whole decode step of Llama-3.1-8B's shape in one CUDA graph, as an engine launches them.

    python benchmarks/h200_chain.py [--tokens 1,8,32,64,256]

Norm and q, k, v; output and residual; norm, gate, up and activation; down and residual, 32 times, and the
head: each by the tactic that a build takes. Attention is left out. Microseconds of a step with kernels that
overlap and with none that does, and the share of the floor: the weights at 4.3 TB/s or the operations at
790 TFLOP/s.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from h200_kernels import BANDWIDTH, Bench, compile_or_none, operand

from pelton.builder.tactics import supporting
from pelton.engine.resources import cores
from pelton.ir.tensors import f32_to_bf16
from pelton.kernels.gpu.driver import Event, Memory, capture
from pelton.kernels.launch import Argument, CallSpec, LaunchSpec, Work
from pelton.kernels.tactic import NodeSpec, TensorSpec, all_tactics

RATE = 790e12
LAYERS = 32
WIDTH, QKV, INNER, VOCAB = 4096, 6144, 14336, 128256
#: op, results, columns, whether it is gated.
STEP = (
    ("norm_linear", QKV, WIDTH),
    ("linear_add", WIDTH, WIDTH),
    ("norm_linear_gated", INNER, WIDTH),
    ("linear_add", WIDTH, INNER),
)
HEAD = ("norm_linear", VOCAB, WIDTH)
Op = tuple[str, int, int]


def call_of(op: Op) -> CallSpec:
    name, n, k = op
    gated = name.endswith("gated")
    weight = operand(2 * n if gated else n, k)
    extra = operand("T", n) if name == "linear_add" else operand(k, dtype="float32")
    attrs: dict[str, bool | int | float | str] = {"eps": 1e-5, **({"kind": "silu"} if gated else {})}
    return CallSpec(inputs=(operand("T", k), weight, None, extra), outputs=(operand("T", n),), attrs=attrs)


def works_of(op: Op, tokens: int) -> tuple[str, tuple[Work, ...]]:
    """The tactic that a build takes, and its launches."""
    call = call_of(op)
    inputs = tuple(None if o is None else TensorSpec(dtype=o.dtype, shape=o.shape) for o in call.inputs)
    known = {n: t for n, t in all_tactics().items() if t.device == "cuda" and t.sm in (0, 90)}
    node = NodeSpec(op=op[0], inputs=inputs, attrs=call.attrs)
    tactic = next(t for t in supporting(node, known) if t.takes(tokens))
    assert tactic.launches is not None
    return tactic.name, tactic.launches(call, tactic.largest_tokens or tokens)


class Chain:
    """A step's launches bound to memory."""

    def __init__(self, bench: Bench, tokens: int) -> None:
        self._bench, self._tokens = bench, tokens

    def step(self) -> list[Any]:
        """What puts the step's launches into the stream, in order."""
        launches: list[Any] = []
        at = self._bench.big.address
        streams = [self._bench.small.address + i * (96 << 20) for i in range(4)]
        x, y, wide, logits = streams
        gain = self._bench.small.address + (390 << 20)
        for _ in range(LAYERS):
            for op, source, residual, target in (
                (STEP[0], x, gain, wide),
                (STEP[1], wide, x, y),
                (STEP[2], y, gain, wide),
                (STEP[3], wide, y, x),
            ):
                launches += self._bound(op, [source, at, 0, residual], target)
                at += 2 * op[1] * op[2] * (2 if op[0].endswith("gated") else 1)
        return launches + self._bound(HEAD, [x, at, 0, gain], logits)

    def _bound(self, op: Op, inputs: list[int], output: int) -> list[Any]:
        found = []
        for work in works_of(op, self._tokens)[1]:
            if isinstance(work, LaunchSpec):
                found.append(self._bench.bind(work, {"T": self._tokens}, inputs, [output]))
            else:
                found.append(self._product(work, inputs, output))
        return found

    def _product(self, work: Any, inputs: list[int], output: int) -> Any:
        def address(argument: Argument | None) -> int:
            if argument is None:
                return 0
            if argument.kind == "workspace":
                return self._bench.workspace.address + argument.offset
            return inputs[argument.index] if argument.kind == "input" else output

        given: dict[str, Any] = {n: address(getattr(work, n)) for n in ("x", "weight", "out", "residual")}
        given |= {n: getattr(work, n) for n in ("n", "k", "x_row", "dtype", "out_dtype")}
        return lambda: self._bench.cublas.matmul(self._bench.stream, tokens=self._tokens, **given)

    def microseconds(self, overlap: bool) -> float:
        self._bench.overlap = overlap
        launches = self.step()
        with capture(self._bench.stream) as captured:
            for launch in launches:
                launch()
        graph = captured.graph
        assert graph is not None
        a, b = Event(timing=True), Event(timing=True)
        best = float("inf")
        for _ in range(8):
            a.record(self._bench.stream)
            graph.launch(self._bench.stream)
            b.record(self._bench.stream)
            b.wait()
            best = min(best, b.milliseconds_since(a))
        graph.close()
        return 1e3 * best


def fill(bench: Bench, memory: Memory) -> None:
    """Random bfloat16: kernels draw less power, and run faster, on zeros."""
    values = f32_to_bf16(np.random.default_rng(0).standard_normal(1 << 24, dtype=np.float32) * 0.02)
    for offset in range(0, memory.nbytes, values.nbytes):
        nbytes = min(values.nbytes, memory.nbytes - offset)
        bench.stream.copy_in(memory.address + offset, values.ctypes.data, nbytes)
    bench.stream.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="1,8,16,32,64,128,256")
    sizes = [int(size) for size in parser.parse_args().tokens.split(",")]
    works: Mapping[int, list[tuple[str, tuple[Work, ...]]]] = {
        t: [works_of(op, t) for op in (*STEP, HEAD)] for t in sizes
    }
    specs = [w for found in works.values() for _, ws in found for w in ws if isinstance(w, LaunchSpec)]
    sources = list(dict.fromkeys(w.kernel for w in specs))
    with ProcessPoolExecutor(cores()) as pool:  # forked before anything here has a thread or a context
        cubins = dict(zip(sources, pool.map(compile_or_none, sources), strict=True))
    params = sum(n * k * (2 if op.endswith("gated") else 1) for op, n, k in STEP) * LAYERS + VOCAB * WIDTH
    bench = Bench({s: c for s, c in cubins.items() if c is not None}, big_bytes=2 * params + (1 << 20))
    for memory in (bench.big, bench.small):
        fill(bench, memory)
    for tokens in sizes:
        floor = 1e6 * max(2 * params / BANDWIDTH, 2 * params * tokens / RATE)
        chain = Chain(bench, tokens)
        apart, together = chain.microseconds(overlap=False), chain.microseconds(overlap=True)
        names = " ".join(name.rpartition(".")[2] for name, _ in works[tokens])
        print(
            f"{tokens:>4} tokens {apart:9.1f} us, overlapping {together:9.1f} us"
            f"{floor / together:5.0%} of floor  {names}",
            flush=True,
        )


if __name__ == "__main__":
    main()
