"""The products of a whole decode step of Llama-3.1-8B's shape in one CUDA graph, as an engine launches them.

    python benchmarks/h200_chain.py [--tokens 1,8,32,64,256] [--quant fp8_row] [--head int8_row]
        [--activations fp8|fp8-static]

Norm and q, k, v; output and residual; norm, gate, up and activation; down and residual, 32 times, and the
head: each by the tactic that a build takes. Attention is left out. Microseconds of a step with kernels that
overlap and with none that does, and the share of the floor: the weights at 4.3 TB/s or the operations at
790 TFLOP/s (codes with codes: twice that).

``--quant``: block types of the layers' weights one after another; ``--head``: that of the head;
``--activations``: what builds ask of their inputs; static ones of o and down are codes, as attention and gate
and up leave them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from h200_kernels import BANDWIDTH, Bench, compile_or_none, operand

from pelton.builder.tactics import supporting
from pelton.engine.cuda.launcher import MATMUL_ADDRESSES
from pelton.engine.resources import cores
from pelton.ir.tensors import f32_to_bf16
from pelton.kernels.gpu.driver import Event, Memory, capture
from pelton.kernels.launch import Argument, CallSpec, LaunchSpec, Work
from pelton.kernels.layouts import LAYOUTS, row_bytes
from pelton.kernels.tactic import NodeSpec, Tactic, TensorSpec, all_tactics

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


def rows_of(op: Op) -> int:
    """Of the weight."""
    return op[1] * (2 if op[0].endswith("gated") else 1)


def call_of(op: Op, quant: str, static: bool = False) -> CallSpec:
    name, n, k = op
    gated = name.endswith("gated")
    weight = operand(rows_of(op), k)
    if quant != "bfloat16":
        weight = replace(weight, dtype="uint8", quant=quant)
    extra = operand("T", n) if name == "linear_add" else operand(k, dtype="float32")
    attrs: dict[str, bool | int | float | str] = {"eps": 1e-5, **({"kind": "silu"} if gated else {})}
    x, y = operand("T", k), operand("T", n)
    if static:
        attrs |= {"x_scale": 0.01, "x_codes": "fp8", **({"y_scale": 0.01, "y_codes": "fp8"} if gated else {})}
        x = replace(x, dtype="float8_e4m3fn") if name == "linear_add" else x
        y = replace(y, dtype="float8_e4m3fn") if gated else y
    return CallSpec(inputs=(x, weight, None, extra), outputs=(y,), attrs=attrs)


@dataclass(frozen=True)
class Chosen:
    """What a build takes for a product."""

    tactic: Tactic
    works: tuple[Work, ...]
    weight_bytes: int
    """As it lies in memory."""


def chosen(op: Op, tokens: int, quant: str, activations: str) -> Chosen:
    """Of the best tactic's layout (``builder.tactics``), the first tactic that takes the step."""
    activations, _, static = activations.partition("-")
    call = call_of(op, quant, bool(static))
    inputs = tuple(
        None if o is None else TensorSpec(dtype=o.dtype, shape=o.shape, quant=o.quant) for o in call.inputs
    )
    known = {n: t for n, t in all_tactics().items() if t.device == "cuda" and t.sm in (0, 90)}
    found = supporting(NodeSpec(op=op[0], inputs=inputs, attrs=call.attrs, activations=activations), known)
    layout = found[0].weight_layouts.get(1, "rows")
    tactic = next(t for t in found if t.takes(tokens) and t.weight_layouts.get(1, "rows") == layout)
    assert tactic.launches is not None
    nbytes = LAYOUTS[layout].nbytes(quant, (rows_of(op), op[2]))
    return Chosen(tactic, tactic.launches(call, tactic.largest_tokens or tokens), -(-nbytes // 256) * 256)


class Chain:
    """A step's launches bound to memory."""

    def __init__(self, bench: Bench, tokens: int, products: Mapping[Op, Chosen]) -> None:
        self._bench, self._tokens, self._products = bench, tokens, products

    def step(self) -> list[Any]:
        """What puts the step's launches into the stream, in order."""
        launches: list[Any] = []
        at = self._bench.big.address
        streams = [self._bench.small.address + i * (96 << 20) for i in range(4)]
        x, y, wide, logits = streams
        gain = self._bench.small.address + (390 << 20)
        for layer in range(LAYERS):
            for op, source, residual, target in (
                (STEP[0], x, gain, wide),
                (STEP[1], wide, x, y),
                (STEP[2], y, gain, wide),
                (STEP[3], wide, y, x),
            ):
                self._tell(layer, op, at)
                launches += self._bound(op, [source, at, 0, residual], target)
                at += self._products[op].weight_bytes
        return launches + self._bound(HEAD, [x, at, 0, gain], logits)

    def _tell(self, layer: int, op: Op, address: int) -> None:
        """Launches of ``op``, whose weight is at ``address``, of the weight that follows."""
        ends = layer == LAYERS - 1 and op == STEP[-1]
        following = HEAD if ends else STEP[(STEP.index(op) + 1) % len(STEP)]
        count = rows_of(following) // 16
        nbytes = self._products[following].weight_bytes // count // 16 * 16
        self._bench.ahead = (address + self._products[op].weight_bytes, nbytes, count)

    def _bound(self, op: Op, inputs: list[int], output: int) -> list[Any]:
        found = []
        for work in self._products[op].works:
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
            return (inputs[argument.index] if argument.kind == "input" else output) + argument.offset

        given: dict[str, Any] = {n: address(getattr(work, n)) for n in MATMUL_ADDRESSES}
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


def fill(bench: Bench, memory: Memory, quant: str) -> None:
    """Random bfloat16, or bytes that are codes or scales below 2: kernels draw less power, and run faster, on
    zeros."""
    rng = np.random.default_rng(0)
    if quant == "bfloat16":
        values = f32_to_bf16(rng.standard_normal(1 << 24, dtype=np.float32) * 0.02).view(np.uint8)
    else:
        values = rng.integers(0, 256, 1 << 25, dtype=np.uint8) & np.uint8(0xBF)
    for offset in range(0, memory.nbytes, values.nbytes):
        nbytes = min(values.nbytes, memory.nbytes - offset)
        bench.stream.copy_in(memory.address + offset, values.ctypes.data, nbytes)
    bench.stream.wait()


def floor_us(quant: str, head: str, tokens: int, *, codes: bool) -> float:
    """Of the weights' bytes, as checkpoints hold them, or of the operations."""
    stored = (
        VOCAB * row_bytes(head, WIDTH) + sum(rows_of(op) * row_bytes(quant, op[2]) for op in STEP) * LAYERS
    )
    layers, head = sum(rows_of(op) * op[2] for op in STEP) * LAYERS, VOCAB * WIDTH
    return 1e6 * max(stored / BANDWIDTH, 2 * tokens * (layers / (2 if codes else 1) + head) / RATE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="1,8,16,32,64,128,256")
    parser.add_argument("--quant", default="bfloat16")
    parser.add_argument("--head", default="bfloat16")
    parser.add_argument("--activations", default="float32")
    args = parser.parse_args()
    cases = [(q, int(size)) for q in args.quant.split(",") for size in args.tokens.split(",")]
    products = {
        (quant, tokens): {op: chosen(op, tokens, quant, args.activations) for op in STEP}
        | {HEAD: chosen(HEAD, tokens, args.head, "float32")}
        for quant, tokens in cases
    }
    works = [w for step in products.values() for p in step.values() for w in p.works]
    sources = list(dict.fromkeys(w.kernel for w in works if isinstance(w, LaunchSpec)))
    with ProcessPoolExecutor(cores()) as pool:  # forked before anything here has a thread or a context
        cubins = dict(zip(sources, pool.map(compile_or_none, sources), strict=True))
    size = max(LAYERS * sum(step[op].weight_bytes for op in STEP) for step in products.values())
    size += 2 * VOCAB * WIDTH
    bench = Bench({s: c for s, c in cubins.items() if c is not None}, big_bytes=size + (1 << 20))
    fill(bench, bench.small, "bfloat16")
    filled = ""
    for (quant, tokens), step in products.items():
        if quant != filled:
            fill(bench, bench.big, quant)
            filled = quant
        names = [p.tactic.name.rpartition(".")[2] for p in step.values()]
        missing = [n for n, p in zip(names, step.values(), strict=True) if not _compiled(p, bench)]
        if missing:
            print(f"{quant} {tokens:>4} tokens: did not compile: {' '.join(missing)}", flush=True)
            continue
        floor = floor_us(quant, args.head, tokens, codes=step[STEP[0]].tactic.precision in ("int8", "fp8"))
        chain = Chain(bench, tokens, step)
        apart, together = chain.microseconds(overlap=False), chain.microseconds(overlap=True)
        print(
            f"{quant} {tokens:>4} tokens {apart:9.1f} us, overlapping {together:9.1f} us"
            f"{floor / together:5.0%} of floor  {' '.join(names)}",
            flush=True,
        )


def _compiled(product: Chosen, bench: Bench) -> bool:
    return all(w.kernel in bench.cubins for w in product.works if isinstance(w, LaunchSpec))


if __name__ == "__main__":
    main()
