"""Times ``hopper_products.cu`` and cuBLASLt at Llama-3.1-8B's shapes, from dozens to hundreds of tokens.

    python benchmarks/h200_products.py [--kinds codes,exact,dense] [--tokens 32,64,128,256,512] [--compile]

As ``h200_kernels.py``: microseconds of a product in a CUDA graph over copies of its weight that L2 does not
hold, overlapping with the one before, and the share of the floor: bytes at 4.3 TB/s, or operations at 790
TFLOP/s and twice that of codes. Beside it the same with its launch before (the norm, codes of the input), and
cuBLASLt's of the same types, without norm and activation. ``--compile`` only compiles.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from h200_kernels import BANDWIDTH, SHAPES, Bench, Variant, compile_or_none, operand

from pelton.engine.resources import cores
from pelton.ir.tensors import f32_to_bf16
from pelton.kernels.gpu.driver import Event, capture
from pelton.kernels.launch import CallSpec, LaunchSpec, OperandSpec, Work
from pelton.kernels.linear.hopper_products import code_rows, many_tiles, product_tiles, products
from pelton.kernels.linear.products import Form

RATE = 790e12
FORMS = {
    "qkv": Form(norm=3),
    "o": Form(residual=3),
    "gate_up": Form(norm=3, gated=True),
    "down": Form(residual=3),
}
#: Bytes of an element of the weight.
KINDS = {"codes": 1, "exact": 1, "dense": 2}


@dataclass(frozen=True)
class Timed:
    """One product of some tokens."""

    kind: str
    name: str
    tokens: int
    tiles: str
    works: tuple[Work, ...]

    @property
    def floor_us(self) -> float:
        n, k = SHAPES[self.name]
        item = KINDS[self.kind]
        return 1e6 * max(item * n * k / BANDWIDTH, item * self.tokens * n * k / RATE)


def call_of(kind: str, name: str) -> CallSpec:
    stacked, k = SHAPES[name]
    form = FORMS[name]
    n = stacked // 2 if form.gated else stacked
    weight = operand(stacked, k)
    if kind != "dense":
        weight = OperandSpec(dtype="uint8", shape=(stacked, k), strides=(k, 1), quant="fp8_row")
    extra = operand("T", n) if form.norm is None else operand(k, dtype="float32")
    inputs = (operand("T", k), weight, None, extra)
    return CallSpec(inputs=inputs, outputs=(operand("T", n),), attrs={"kind": "silu", "eps": 1e-5})


def timed(kinds: list[str], tokens: list[int]) -> Iterator[Timed]:
    for kind in kinds:
        for name, form in FORMS.items():
            stacked, k = SHAPES[name]
            n, exact = stacked // 2 if form.gated else stacked, kind == "exact"
            for t in tokens:
                quant = "" if kind == "dense" else "fp8_row"
                if t > 512 and not exact:
                    tiles = many_tiles(stacked, next((m for m in (640, 768, 1024) if t <= m), 0))
                else:
                    rows = code_rows(t, exact)
                    tiles = product_tiles(n, k * KINDS[kind], rows, form.gated, quant, exact=exact)
                what = f"{tiles.x_rows}x{tiles.columns * tiles.wg_n}/{tiles.split}"
                yield Timed(kind, name, t, what, products(form, call_of(kind, name), tiles, t, exact=exact))


def fill(bench: Bench, kind: str) -> None:
    """Random weights, never zeros: e4m3 around 1 of either sign, or bfloat16."""
    rng = np.random.default_rng(0)
    if kind == "dense":
        values = f32_to_bf16(rng.standard_normal(1 << 24, dtype=np.float32)).view(np.uint8)
    else:
        signs = rng.integers(0, 2, 1 << 25) << 7
        values = (rng.integers(0x30, 0x60, 1 << 25) | signs).astype(np.uint8)
    for offset in range(0, bench.big.nbytes, values.nbytes):
        bench.stream.copy_in(bench.big.address + offset, values.ctypes.data, values.nbytes)
    bench.stream.wait()


def places(bench: Bench, what: Timed) -> list[tuple[list[int], list[int]]]:
    """(Inputs, outputs) of several copies of the weight."""
    n, k = SHAPES[what.name]
    size = -(-(n * k * KINDS[what.kind] + 4 * n) // 4096) * 4096
    x, extra, out = (bench.small.address + offset for offset in (0, 384 << 20, 512 << 20))
    copies = min(24, bench.big.nbytes // size)
    return [([x, bench.big.address + i * size, 0, extra], [out]) for i in range(copies)]


def microseconds(bench: Bench, what: Timed, works: tuple[Work, ...]) -> float:
    variant = Variant(what.name, what.tokens, {}, works, {"T": what.tokens}, what.floor_us)
    return bench.microseconds(variant, places(bench, what))


def cublaslt(bench: Bench, what: Timed) -> float:
    """Of the same types, rows of codes scaled."""
    n, k = SHAPES[what.name]
    dtype = "bfloat16" if what.kind == "dense" else "float8_e4m3fn"
    scales = (
        {}
        if what.kind == "dense"
        else {"x_scales": bench.small.address, "weight_scales": bench.small.address}
    )
    where = places(bench, what)

    def product(weight: int) -> None:
        bench.cublas.matmul(
            bench.stream,
            tokens=what.tokens,
            n=n,
            k=k,
            x_row=k,
            dtype=dtype,
            out_dtype="bfloat16",
            x=bench.big.address if scales else bench.small.address,
            weight=weight,
            out=bench.workspace.address,
            **scales,
        )

    product(where[0][0][1])  # its algorithm is searched for once
    bench.stream.wait()
    with capture(bench.stream) as captured:
        for inputs, _ in where:
            product(inputs[1])
    graph = captured.graph
    assert graph is not None
    a, b = Event(timing=True), Event(timing=True)
    best = float("inf")
    for _ in range(4):
        a.record(bench.stream)
        graph.launch(bench.stream)
        b.record(bench.stream)
        b.wait()
        best = min(best, b.milliseconds_since(a))
    graph.close()
    return 1e3 * best / len(where)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--tokens", default="32,64,128,256,512")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    found = list(timed(args.kinds.split(","), [int(t) for t in args.tokens.split(",")]))
    sources = list(dict.fromkeys(w.kernel for t in found for w in t.works if isinstance(w, LaunchSpec)))
    with ProcessPoolExecutor(cores()) as pool:  # forked before anything here has a thread or a context
        cubins = dict(zip(sources, pool.map(compile_or_none, sources, chunksize=4), strict=True))
    print(
        f"{len(found)} products, {len(sources)} kernels, {sum(map(bool, cubins.values()))} compiled",
        flush=True,
    )
    if args.compile:
        return
    bench = Bench({s: c for s, c in cubins.items() if c is not None}, big_bytes=2 << 30)
    bench.overlap = True
    filled = ""
    for what in found:
        if filled != (dtype := "dense" if what.kind == "dense" else "codes"):
            fill(bench, filled := dtype)
        whole, alone = microseconds(bench, what, what.works), microseconds(bench, what, what.works[-1:])
        other = f"{cublaslt(bench, what):8.1f}" if what.kind != "exact" else ""
        print(
            f"{what.kind:<6}{what.name:<8}{what.tokens:>5} {what.tiles:<12}{alone:8.1f} us "
            f"{what.floor_us / alone:4.0%}  with the launch before {whole:8.1f}  cuBLASLt {other}",
            flush=True,
        )


if __name__ == "__main__":
    main()
