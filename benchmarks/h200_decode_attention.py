"""Times a layer's attention in decode steps on an H200, at Llama-3.1-8B's shape, and sweeps its tiles.

    python benchmarks/h200_decode_attention.py [--sweep] [--page 16] [--kv-dtype int8] [--json FILE]
        [--batches 1,8] [--contexts 256,1024] [--writes 2048,8192]

RoPE, KV write and attention, as one kernel (``rope_paged_attention``: Triton's, and that of clusters) and as
the ops it stands for, by the tactics that a plan takes: microseconds in a CUDA graph, whose caches are too
many for L2, and their share of the floor, the bytes of the keys and values at 4.3 TB/s. ``--sweep`` tries
tiles, stages and numbers of programs of the one kernel. With codes of 8 bits the kernels are timed with keys
less a vector, too ("shifted"). ``--writes``: instead, ``rope_kv_write`` of so many tokens, as in prefills.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from h200_kernels import BANDWIDTH, DIM, HEADS, KV_HEADS, Bench, Variant, compile_or_none, operand

from pelton.dtypes import ITEMSIZE, KV_CODES
from pelton.engine.resources import cores
from pelton.kernels.gpu.driver import Event, Memory, capture
from pelton.kernels.launch import Argument, CallSpec, LaunchSpec, OperandSpec, Work, on_behalf
from pelton.kernels.rope_kv_write import cuda as rope_kv_write
from pelton.kernels.rope_paged_attention import hopper
from pelton.kernels.rope_paged_attention.cuda import LARGEST, Decode, decode, decode_tiles
from pelton.kernels.tactic import NodeSpec, Tactic, TensorSpec, shipped_tactics

BATCHES = (1, 2, 4, 8, 16, 32, 64, 256)
CONTEXTS = (256, 1024, 8192)
MAX_CONTEXT = 8192
ROW = (HEADS + 2 * KV_HEADS) * DIM


#: Operands of rope_paged_attention that rope_kv_write has.
_WRITE = (0, 1, 2, 3, 4, 5, 6, 10, 11, 12, 13, 14, 15)


def call_of(page: int, kv_dtype: str = "bfloat16", *, shifted: bool = False) -> CallSpec:
    """The op over views of one projection; ``shifted``: of keys less a vector, rounded by their queries."""
    heads = [
        OperandSpec(dtype="bfloat16", shape=("T", n, DIM), strides=(ROW, DIM, 1))
        for n in (HEADS, KV_HEADS, KV_HEADS)
    ]
    cache = operand("P0", KV_HEADS, page, DIM, dtype=kv_dtype)
    scale = operand(KV_HEADS, dtype="float32") if kv_dtype in KV_CODES else None
    step = [operand("T", dtype="int32"), operand("B", MAX_CONTEXT // page, dtype="int32")]
    step += [operand("B+1", dtype="int32"), operand("B", dtype="int32")]
    wide = [operand(KV_HEADS, n * DIM, dtype="float32") for n in (1, 2)]
    keys = (scale, scale, *(wide if shifted else (None, None)))
    return CallSpec(
        inputs=(*heads, operand("T", DIM, dtype="float32"), cache, cache, *step, None, None, *keys, None),
        outputs=(operand("T", HEADS, DIM),),
        attrs={"eps": 0.0, "scale": DIM**-0.5, "window": 0, "softcap": 0.0},
    )


def separately(call: CallSpec, batch: int) -> tuple[Work, ...]:
    """rope_kv_write and paged_attention by the tactics that a plan has for so many sequences."""

    def best(op: str, spec: CallSpec) -> tuple[Work, ...]:
        inputs = tuple(None if o is None else TensorSpec(dtype=o.dtype, shape=o.shape) for o in spec.inputs)
        node = NodeSpec(op=op, inputs=inputs, attrs=spec.attrs)
        known = [t for t in shipped_tactics(op).values() if t.device == "cuda" and t.takes(batch)]
        fitting: list[Tactic] = [t for t in known if t.supports(node)]
        tactic = max(fitting, key=lambda t: (t.priority, -(t.largest_tokens or 1 << 30)))
        describe = tactic.decode or tactic.launches
        assert describe is not None
        return describe(spec, batch)

    out = call.outputs[0]
    first, second = _WRITE, (4, 5, 7, 8, 9, 12, 13, 16)
    write = CallSpec(inputs=tuple(call.inputs[i] for i in first), outputs=(out,), attrs=call.attrs)
    attend = CallSpec(inputs=(out, *(call.inputs[i] for i in second)), outputs=(out,), attrs=call.attrs)
    arguments = [[Argument("input", index=i) for i in indices] for indices in (first, second)]
    result = Argument("output")
    return (
        *on_behalf(best("rope_kv_write", write), arguments[0], [result]),
        *on_behalf(best("paged_attention", attend), [result, *arguments[1]], [result]),
    )


def write_of(call: CallSpec) -> tuple[Work, ...]:
    """rope_kv_write's launches for the operands of rope_paged_attention."""
    inputs = tuple(call.inputs[i] for i in _WRITE)
    return rope_kv_write.launches(CallSpec(inputs=inputs, outputs=call.outputs, attrs=call.attrs), 8192)


@dataclass(frozen=True)
class Shape:
    """Sequences and their keys."""

    batch: int
    context: int
    page: int
    kv_dtype: str = "bfloat16"

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.kv_dtype]

    @property
    def floor(self) -> float:
        return 1e6 * self.batch * self.context * KV_HEADS * DIM * 2 * self.itemsize / BANDWIDTH

    def variant(self, what: str, tiles: dict[str, int], works: tuple[Work, ...]) -> Variant:
        dims = {"T": self.batch, "B": self.batch, "B+1": self.batch + 1}
        return Variant(what, self.batch, tiles, works, dims, self.floor)


def variants(shape: Shape, sweep: bool) -> Iterator[Variant]:
    call = call_of(shape.page, shape.kv_dtype)
    yield shape.variant("separate", {}, separately(call, shape.batch))
    largest = next((n for n in LARGEST if shape.batch <= n), 0)
    how = decode_tiles(largest, KV_HEADS, shape.kv_dtype)
    cluster = hopper.cluster(largest, KV_HEADS, HEADS // KV_HEADS, DIM)
    for shifted in (False, True)[: 2 if shape.kv_dtype in KV_CODES else 1]:
        named = ", shifted" if shifted else ""
        call = call_of(shape.page, shape.kv_dtype, shifted=shifted)
        yield shape.variant("one" + named, asdict(how), decode(call, how, shape.batch))
        yield shape.variant("clusters" + named, asdict(cluster), hopper.decode(call, cluster))
    for keys, warps, stages in SWEEP if sweep else ():
        # From one program a KV head to what fills the GPU several times.
        for splits in (1, 2, 4, 8, 16, 32, 64):
            per = -(-shape.context // splits)
            programs = splits * shape.batch * KV_HEADS
            if per < min(keys, 64) or (splits > 1 and programs > 4300) or programs < 32:
                continue
            how = Decode(splits, keys, keys, stages, warps)
            yield shape.variant("sweep", asdict(how), decode(call, how, shape.batch))


def time_writes(bench: Bench, works: dict[tuple[int, bool], tuple[Work, ...]], kv_dtype: str) -> None:
    """Of steps of (tokens, whether keys are shifted): each a sequence's next tokens."""
    places = Places(bench)
    for (tokens, shifted), of in works.items():
        addresses = places.of_write(tokens, kv_dtype)
        dims = {"T": tokens, "B": 1, "B+1": 2}
        nbytes = 2 * ROW + 2 * HEADS * DIM + 2 * KV_HEADS * DIM * ITEMSIZE[kv_dtype]
        floor = 1e6 * tokens * nbytes / BANDWIDTH
        us = microseconds(bench, Variant("write", tokens, {}, of, dims, floor), [addresses])
        what = "shifted" if shifted else ""
        print(f"{tokens:>6} tokens {what:<9}{us:>8.2f} us {floor / us:>5.0%}", flush=True)


#: Keys at a time, warps, stages.
SWEEP = [
    *((16, 1, stages) for stages in (3, 5, 7, 9)),
    *((32, warps, stages) for warps, stages in ((1, 3), (1, 5), (1, 7), (2, 3), (2, 5))),
    *((64, warps, stages) for warps in (1, 2, 4) for stages in (3, 5)),
    *((128, warps, stages) for warps, stages in ((2, 3), (4, 3), (4, 5))),
]


TILES = ("splits", "least", "keys", "stages", "warps", "blocks")


def microseconds(bench: Bench, variant: Variant, addresses: list[tuple[list[int], list[int]]]) -> float:
    """Of one layer, the best of five graphs."""
    layers = [[bench.bind(work, variant.dims, *pair) for work in variant.works] for pair in addresses]
    wanted = max(len(layers), min(48, int(3000 / variant.floor_us) + 1))
    with capture(bench.stream) as captured:
        for layer in itertools.islice(itertools.cycle(layers), wanted):
            for launch in layer:
                launch()
    assert captured.graph is not None
    a, b = Event(timing=True), Event(timing=True)
    times = []
    for _ in range(5):
        a.record(bench.stream)
        captured.graph.launch(bench.stream)
        b.record(bench.stream)
        b.wait()
        times.append(b.milliseconds_since(a))
    captured.graph.close()
    for event in (a, b):
        event.close()
    return 1e3 * min(times) / wanted


class Places:
    """Addresses of a shape's operands, with as many caches as L2 cannot hold."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.caches = Memory(9 << 30)
        self.step = Memory(256 << 20)
        noise = np.random.default_rng(0).standard_normal(16 << 20, np.float32)
        # Numbers as bfloat16, and no NaN as codes of 8 bits.
        chunk = (noise.view(np.uint32) >> 16).astype(np.uint16) & 0xF7F7
        for memory in (self.caches, self.step):
            for at in range(0, memory.nbytes, chunk.nbytes):
                nbytes = min(chunk.nbytes, memory.nbytes - at)
                bench.stream.copy_in(memory.address + at, chunk.ctypes.data, nbytes)
        bench.stream.wait()

    def put(self, array: Any, at: int) -> int:
        self.bench.stream.copy_in(at, array.ctypes.data, array.nbytes)
        self.bench.stream.wait()
        return at + -(-array.nbytes // 256) * 256

    def of(self, shape: Shape) -> list[tuple[list[int], list[int]]]:
        batch, per = shape.batch, -(-shape.context // shape.page)
        table = np.zeros((batch, MAX_CONTEXT // shape.page), np.int32)
        table[:, :per] = np.random.default_rng(0).permutation(batch * per).reshape(batch, per)
        last = (shape.context - 1) % shape.page
        slots = (table[:, per - 1] * shape.page + last).astype(np.int32)
        ends, lens = np.arange(batch + 1, dtype=np.int32), np.full(batch, shape.context, np.int32)
        angle = np.random.default_rng(1).standard_normal((batch, DIM // 2), np.float32)
        at, places = self.step.address + (128 << 20), []
        turns = np.concatenate([np.cos(angle), np.sin(angle)], 1)
        for array in (turns, slots, table, ends, lens, *_of_keys()):
            places.append(at)
            at = self.put(np.ascontiguousarray(array), at)
        cache = batch * per * shape.page * KV_HEADS * DIM * shape.itemsize
        copies = max(1, min(24, (256 << 20) // (2 * cache)))
        found = []
        for i in range(copies):
            qkv = self.step.address + i * batch * ROW * 2
            heads = [qkv, qkv + HEADS * DIM * 2, qkv + (HEADS + KV_HEADS) * DIM * 2]
            kv = [self.caches.address + (2 * i + j) * cache for j in (0, 1)]
            inputs = [*heads, places[0], *kv, *places[1:5], 0, 0, places[5], *places[5:]]
            found.append((inputs, [self.step.address + (160 << 20)]))
        return found

    def of_write(self, tokens: int, kv_dtype: str) -> tuple[list[int], list[int]]:
        angle = np.random.default_rng(1).standard_normal((tokens, DIM // 2), np.float32)
        at, places = self.step.address + (128 << 20), []
        turns = np.concatenate([np.cos(angle), np.sin(angle)], 1)
        for array in (turns, np.arange(tokens, dtype=np.int32), *_of_keys()):
            places.append(at)
            at = self.put(np.ascontiguousarray(array), at)
        qkv, cache = self.step.address, tokens * KV_HEADS * DIM * ITEMSIZE[kv_dtype]
        heads = [qkv, qkv + HEADS * DIM * 2, qkv + (HEADS + KV_HEADS) * DIM * 2]
        kv = [self.caches.address + i * cache for i in (0, 1)]
        inputs = [*heads, places[0], *kv, places[1], 0, 0, places[2], *places[2:]]
        return inputs, [self.step.address + (160 << 20)]


def _of_keys() -> list[Any]:
    """Scales, what keys are stored less, and their queries."""
    noise = np.random.default_rng(2).standard_normal((KV_HEADS, 3 * DIM), np.float32)
    return [np.full(KV_HEADS, 0.02, np.float32), noise[:, :DIM], np.abs(noise[:, DIM:])]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--kv-dtype", choices=("bfloat16", *KV_CODES), default="bfloat16")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)))
    parser.add_argument("--writes", default="")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    batches = [int(b) for b in args.batches.split(",")]
    contexts = [int(c) for c in args.contexts.split(",")]
    shapes = [Shape(b, c, args.page, args.kv_dtype) for b in batches for c in contexts]
    writes = {
        (int(n), shifted): write_of(call_of(args.page, args.kv_dtype, shifted=shifted))
        for n in filter(None, args.writes.split(","))
        for shifted in (False, True)
    }
    wanted = [(shape, v) for shape in shapes for v in variants(shape, args.sweep) if not writes]
    works = [*(v.works for _, v in wanted), *writes.values()]
    sources = list(dict.fromkeys(w.kernel for of in works for w in of if isinstance(w, LaunchSpec)))
    print(f"{len(wanted)} variants, {len(sources)} kernels", flush=True)
    # Forked before anything here has a thread or a context.
    with ProcessPoolExecutor(cores()) as pool:
        found = dict(zip(sources, pool.map(compile_or_none, sources), strict=True))
    cubins = {source: cubin for source, cubin in found.items() if cubin is not None}
    print(f"{len(cubins)} compiled", flush=True)
    bench = Bench(cubins)
    if writes:
        return time_writes(bench, writes, args.kv_dtype)
    bench.overlap = True  # as in a decode step
    places = Places(bench)
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        addresses = places.of(shape)
        for variant in (v for s, v in wanted if s == shape):
            kernels = [cubins.get(w.kernel) for w in variant.works]
            if any(k is None or k.shared > bench.device.max_shared for k in kernels):
                continue
            us = microseconds(bench, variant, addresses)
            row = {"what": variant.what, "batch": shape.batch, "context": shape.context, "us": round(us, 2)}
            rows.append({**row, "floor": round(shape.floor, 2), **variant.tiles})
        mine = [r for r in rows if (r["batch"], r["context"]) == (shape.batch, shape.context)]
        swept = sorted((r for r in mine if r["what"] == "sweep"), key=lambda r: r["us"])[:3]
        for r in [r for r in mine if r["what"] != "sweep"] + swept:
            tiles = " ".join(f"{k}={v}" for k, v in r.items() if k in TILES)
            print(
                f"{r['batch']:>4} x {r['context']:<5}{r['what']:<18}{r['us']:>9.2f} us"
                f" {r['floor'] / r['us']:>5.0%}  {tiles}",
                flush=True,
            )
        if args.json:
            args.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
