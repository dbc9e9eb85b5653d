"""Times the native kernels alone, at SmolLM2-135M's shapes by default.

    python benchmarks/kernels_cpu.py [--threads 2] [--only attention] [--level avx2]

Prints the best microseconds of a call, with GFLOP/s and GB/s where they mean something. Each kernel
runs in a loop on warm data, as the layers of a step do with the caches in L3.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from pelton.kernels import native
from pelton.kernels.host import HostKernel
from pelton.kernels.native import Array, Attr, NativeTensor


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the network's kernels depend on."""

    hidden: int = 576
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    mlp: int = 1536


@dataclass(frozen=True, kw_only=True)
class Bench:
    name: str
    kernel: str
    inputs: list[Array | NativeTensor | None]
    outputs: list[Array]
    attrs: list[Attr] = field(default_factory=list)
    workspace_bytes: int = 0
    flops: float = 0.0
    nbytes: float = 0.0
    host: HostKernel | None = None


def floats(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def ints(*values: int) -> Array:
    return np.array(values, np.int32)


def attention(
    shape: Shape, lens: list[tuple[int, int]], dtype: str = "float32", window: int = 0, block_size: int = 16
) -> Bench:
    """Sequences of (queries, keys), blocks of all sequences interleaved."""
    columns = max(-(-keys // block_size) for _, keys in lens)
    n = len(lens)
    table = np.array([[b + n * i for i in range(columns)] for b in range(n)], np.int32)
    cache = floats(n * columns, shape.kv_heads, block_size, shape.head_dim)
    k: Array | NativeTensor = cache.astype(np.float16) if dtype == "float16" else cache
    v: Array | NativeTensor = k.copy() if isinstance(k, np.ndarray) else k
    if dtype == "bfloat16":
        k = NativeTensor((cache.view(np.uint32) >> 16).astype(np.uint16), "bfloat16")
        v = NativeTensor(k.data.copy(), "bfloat16")
    tokens = sum(q for q, _ in lens)
    cu = np.cumsum([0, *(q for q, _ in lens)]).astype(np.int32)
    pairs = sum(sum(min(p + 1, window or p + 1) for p in range(keys - q, keys)) for q, keys in lens)
    item = 4 if dtype == "float32" else 2
    read = sum(min(keys, window + q if window else keys) for q, keys in lens)
    return Bench(
        name=f"attention {n} x {lens[0]} {dtype}" + (f" window {window}" if window else ""),
        kernel="cpu.paged_attention",
        inputs=[
            floats(tokens, shape.heads, shape.head_dim),
            k,
            v,
            table,
            cu,
            ints(*(keys for _, keys in lens)),
        ],
        outputs=[floats(tokens, shape.heads, shape.head_dim)],
        attrs=[shape.head_dim**-0.5, window, 0.0],
        workspace_bytes=16 * shape.heads * (columns * block_size // 128 + 1) * (shape.head_dim + 2) * 4,
        flops=4.0 * pairs * shape.heads * shape.head_dim,
        nbytes=2.0 * read * shape.kv_heads * shape.head_dim * item,
    )


def small(shape: Shape, tokens: int) -> Iterator[Bench]:
    """Everything but attention and products."""
    t, h, d = tokens, shape.hidden, shape.head_dim
    x = floats(t, h)
    yield Bench(
        name=f"rms_norm {t}", kernel="cpu.rms_norm", inputs=[x, floats(h)], outputs=[floats(t, h)],
        attrs=[1e-5], nbytes=8.0 * t * h,
    )  # fmt: skip
    yield Bench(
        name=f"add_rms_norm {t}", kernel="cpu.add_rms_norm", inputs=[x, floats(t, h), floats(h)],
        outputs=[floats(t, h), floats(t, h)], attrs=[1e-5], nbytes=16.0 * t * h,
    )  # fmt: skip
    packed = floats(t, 2 * shape.mlp)
    for kind in ("silu", "gelu_tanh", "gelu"):
        yield Bench(
            name=f"gated_activation {kind} {t}", kernel="cpu.gated_activation",
            inputs=[packed[:, : shape.mlp], packed[:, shape.mlp :]], outputs=[floats(t, shape.mlp)],
            attrs=[kind], nbytes=12.0 * t * shape.mlp,
        )  # fmt: skip
    yield Bench(
        name=f"rope_cos_sin {t}", kernel="cpu.rope_cos_sin",
        inputs=[np.arange(t, dtype=np.int32), floats(d // 2)], outputs=[floats(t, d)], attrs=[1.0],
    )  # fmt: skip
    heads = shape.heads + 2 * shape.kv_heads
    qkv = floats(t, heads * d).reshape(t, heads, d)
    caches = [floats(t // 16 + 1, shape.kv_heads, 16, d) for _ in range(2)]
    yield Bench(
        name=f"rope_kv_write {t}", kernel="cpu.rope_kv_write",
        inputs=[
            qkv[:, : shape.heads], qkv[:, shape.heads : -shape.kv_heads], qkv[:, -shape.kv_heads :],
            floats(t, d), *caches, np.arange(t, dtype=np.int32), None, None,
        ],
        outputs=[floats(t, shape.heads, d)], attrs=[0.0], nbytes=8.0 * t * heads * d,
    )  # fmt: skip


def arithmetic(shape: Shape, tokens: int) -> Iterator[Bench]:
    """What a model's own arithmetic becomes, and a call of a Python function that does nothing."""
    x, row, y = floats(tokens, shape.hidden), floats(tokens, 1), floats(tokens, shape.hidden)
    nbytes = 2.0 * x.nbytes
    for kind in ("exp", "rsqrt", "sin"):
        yield Bench(
            name=f"unary {kind} {tokens}",
            kernel="cpu.unary",
            inputs=[np.abs(x)],
            outputs=[y],
            attrs=[kind],
            nbytes=nbytes,
        )
    for name, other in (("vector", floats(shape.hidden)), ("value a row", row)):
        yield Bench(
            name=f"binary mul {name} {tokens}",
            kernel="cpu.binary",
            inputs=[x, other],
            outputs=[y],
            attrs=["mul"],
            nbytes=nbytes,
        )
    yield Bench(
        name=f"reduce mean {tokens}",
        kernel="cpu.reduce",
        inputs=[x],
        outputs=[row],
        attrs=["mean", True],
        nbytes=float(x.nbytes),
    )
    yield Bench(name=f"softmax {tokens}", kernel="cpu.softmax", inputs=[x], outputs=[y], nbytes=nbytes)
    yield Bench(
        name=f"python function {tokens}",
        kernel=HostKernel.kernel,
        inputs=[x],
        outputs=[y],
        host=HostKernel(lambda x, out: None, ["x"], {}),
    )


def benches(shape: Shape) -> Iterator[Bench]:
    for tokens in (1, 8, 256):
        yield from small(shape, tokens)
        yield from arithmetic(shape, tokens)
    for dtype in ("float32", "float16", "bfloat16"):
        yield attention(shape, [(1, 320)], dtype)
        yield attention(shape, [(1, 320)] * 8, dtype)
        yield attention(shape, [(1, 4096)], dtype)
        yield attention(shape, [(256, 256)], dtype)
    yield attention(shape, [(512, 2048)])
    yield attention(shape, [(32, 32)] * 8)
    yield attention(Shape(heads=4, kv_heads=1, head_dim=256), [(1, 320)])
    yield attention(Shape(heads=4, kv_heads=1, head_dim=256), [(256, 1024)], window=512)
    yield attention(Shape(heads=32, kv_heads=8, head_dim=128), [(1, 1024)])
    yield attention(Shape(heads=32, kv_heads=8, head_dim=128), [(256, 256)])


def seconds(team: native.Team, bench: Bench, level: str | None, budget: float) -> float:
    """Best time of one call over short windows (other processes only ever add to it); ``level``
    None: the best. Calls repeat inside the library, as in a plan."""
    repeat = team.repeat(
        bench.kernel,
        bench.inputs,
        bench.outputs,
        bench.attrs,
        workspace_bytes=bench.workspace_bytes,
        level=level,
        function=bench.host.address if bench.host else None,
    )
    repeat(2)
    best, inner, until = float("inf"), 1, time.perf_counter() + budget
    while time.perf_counter() < until:
        start = time.perf_counter()
        repeat(inner)
        elapsed = time.perf_counter() - start
        best = min(best, elapsed / inner)
        if elapsed < 3e-4:
            inner *= 2
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--level", help="ISA level (the best by default)")
    parser.add_argument("--only", default="", help="substring of the kernels to time")
    parser.add_argument("--seconds", type=float, default=0.5, help="time spent on each kernel")
    args = parser.parse_args()
    print(f"level {args.level or native.cpu_level()}, {args.threads} threads")
    with native.Team(args.threads) as team:
        for bench in benches(Shape()):
            if args.only not in bench.name:
                continue
            t = seconds(team, bench, args.level, args.seconds)
            rates = f"{bench.flops / t / 1e9:8.1f} GFLOP/s" if bench.flops else " " * 16
            rates += f"{bench.nbytes / t / 1e9:8.1f} GB/s" if bench.nbytes else ""
            print(f"{bench.name:42s}{t * 1e6:10.1f} us {rates}")


if __name__ == "__main__":
    main()
