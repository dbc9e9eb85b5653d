"""What sums in float16 cost where nothing is gained: kernels alone, in float16, on an H200.

    PYTHONPATH=src:. python benchmarks/h200_half_sums.py [--tokens 2048]

Products and attention of Llama-3.1-8B's shapes by the kernels of either way of adding, microseconds and
TFLOP/s. ``mma.sync``: Triton's kernels as they are compiled for a GeForce card (PTX for sm_89), which this
GPU runs too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from h200_kernels import DIM, HEADS, KV_HEADS, SHAPES, Bench, Variant, operand
from tests.gpu.ptx import ptx_of_all

import pelton
from pelton.builder.cubins import Cubin, compile_all
from pelton.kernels.gpu.driver import Event, capture
from pelton.kernels.launch import CallSpec, LaunchSpec, Work
from pelton.kernels.linear.hopper_products import dense_tactics
from pelton.kernels.linear.products import Form, gemm
from pelton.kernels.paged_attention import hopper
from pelton.kernels.tactic import all_tactics

PAGE = 16


def product_call(n: int, k: int, gated: bool) -> CallSpec:
    x, weight = operand("T", k, dtype="float16"), operand(n, k, dtype="float16")
    out = operand("T", n // 2 if gated else n, dtype="float16")
    return CallSpec(inputs=(x, weight, None), outputs=(out,), attrs={"kind": "silu"} if gated else {})


def attention_call() -> CallSpec:
    q, cache = operand("T", HEADS, DIM, dtype="float16"), operand("P", KV_HEADS, PAGE, DIM, dtype="float16")
    table, ends = operand("B", 8192 // PAGE, dtype="int32"), operand("B+1", dtype="int32")
    inputs = (q, cache, cache, table, ends, operand("B", dtype="int32"), *[None] * 3)
    return CallSpec(inputs=inputs, outputs=(q,), attrs={"scale": DIM**-0.5, "window": 0, "softcap": 0.0})


def kernels(tokens: int) -> dict[str, dict[str, tuple[tuple[Work, ...], float]]]:
    """By shape and kernel: launches, and their operations."""
    found: dict[str, dict[str, tuple[tuple[Work, ...], float]]] = {}
    for name in ("qkv", "o", "gate_up", "down"):
        n, k = SHAPES[name]
        form = Form(gated=name == "gate_up")
        call, ops = product_call(n, k, form.gated), 2.0 * tokens * n * k
        found[name] = {
            "float32": (gemm(form, call, tokens), ops),
            "float16": (gemm(form, call, tokens, half_sums=True), ops),
        }
        if form.gated:
            of_any = dense_tactics("linear_gated", form)[-1].launches
            assert of_any is not None
            found[name]["hopper"] = (of_any(call, tokens), ops)
    call, ops = attention_call(), 4.0 * tokens * (tokens + 1) / 2 * HEADS * DIM
    known = all_tactics()
    for name in ("", ".half_sums"):
        launches = known["cuda.paged_attention" + name].launches
        assert launches is not None
        kind = "float16" if name else "float32"
        found.setdefault("attention", {})[kind] = (launches(call, tokens), ops)
    found["attention"]["hopper"] = ((hopper.attention(call, tokens),), ops)
    return found


def time_cublaslt(bench: Bench, tokens: int, n: int, k: int) -> float:
    """Microseconds."""
    addresses = bench.linear_addresses(n, k)
    with capture(bench.stream) as captured:
        for (x, weight, _), (out,) in addresses:
            bench.cublas.matmul(
                bench.stream,
                tokens=tokens,
                n=n,
                k=k,
                x_row=k,
                dtype="float16",
                out_dtype="float16",
                x=x,
                weight=weight,
                out=out,
            )
    assert captured.graph is not None
    a, b, best = Event(timing=True), Event(timing=True), float("inf")
    for _ in range(4):
        a.record(bench.stream)
        captured.graph.launch(bench.stream)
        b.record(bench.stream)
        b.wait()
        best = min(best, b.milliseconds_since(a))
    return 1e3 * best / len(addresses)


def time_kernels(tokens: int) -> None:
    every = kernels(tokens)
    launches = [w for kinds in every.values() for works, _ in kinds.values() for w in works]
    sources = list(dict.fromkeys(w.kernel for w in launches if isinstance(w, LaunchSpec)))
    older = [s for s in sources if not hasattr(s, "file")]
    dims = {"T": tokens, "B": 1}
    compilers: dict[str, tuple[Callable[..., list[Cubin | pelton.PeltonError]], int]] = {
        "": (compile_all, 90),
        " mma.sync": (ptx_of_all, 89),
    }
    for suffix, (compiler, sm) in compilers.items():
        own = older if suffix else sources
        bench = Bench({s: c for s, c in zip(own, compiler(own, sm), strict=True) if isinstance(c, Cubin)})
        for name, kinds in every.items():
            for kind, (works, ops) in kinds.items():
                if suffix and kind == "hopper":
                    continue
                if name == "attention":
                    addresses = bench.attention_addresses(PAGE, [(tokens, tokens)])
                else:
                    addresses = bench.linear_addresses(*SHAPES[name])
                us = bench.microseconds(Variant(name, tokens, {}, works, dims, 0.0), addresses)
                print(
                    f"{name:<10}{kind + suffix:<18}{us:>9.1f} us {ops / us / 1e6:>6.0f} TFLOP/s", flush=True
                )
            if not suffix and name in SHAPES:
                n, k = SHAPES[name]
                us = time_cublaslt(bench, tokens, n, k)
                rate = 2.0 * tokens * n * k / us / 1e6
                print(f"{name:<10}{'cuBLASLt':<18}{us:>9.1f} us {rate:>6.0f} TFLOP/s", flush=True)
        bench.big.close()
        bench.small.close()
        bench.workspace.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    time_kernels(parser.parse_args().tokens)


if __name__ == "__main__":
    main()
