"""A decode step of Llama-3.1-8B's shape, but for embedding and sampling: ``h200_chain.py`` with attention.

    python benchmarks/h200_step.py [--tokens 1,8] [--context 256,1024] [--quant fp8_row] [--head int8_row]

Products and, of a token a sequence at ``context`` keys, RoPE, KV write and attention, in one CUDA graph as an
engine launches them. Microseconds of the step without and with attention, and what attention adds a layer:
less than it takes alone where it runs beside the products, more where it keeps them from overlapping.
``--quant``, ``--head``: block types of the layers' weights and of the head.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import h200_chain as chain
import h200_decode_attention as decode
import numpy as np
from h200_kernels import DIM, HEADS, KV_HEADS, Bench, compile_or_none

from pelton.builder.tactics import supporting
from pelton.engine.resources import cores
from pelton.kernels.gpu.driver import Memory
from pelton.kernels.launch import LaunchSpec, Work
from pelton.kernels.tactic import NodeSpec, TensorSpec, all_tactics

PAGE = 16


def attention_of(batch: int) -> tuple[Work, ...]:
    """What a build takes."""
    call = decode.call_of(PAGE)
    inputs = tuple(None if o is None else TensorSpec(dtype=o.dtype, shape=o.shape) for o in call.inputs)
    known = {n: t for n, t in all_tactics().items() if t.device == "cuda" and t.sm in (0, 90)}
    node = NodeSpec(op="rope_paged_attention", inputs=inputs, attrs=call.attrs)
    tactic = next(t for t in supporting(node, known) if t.takes(batch))
    assert tactic.decode is not None
    return tactic.decode(call, batch)


class Caches:
    """Of all layers, and a step's tables, for ``batch`` sequences of ``context`` keys."""

    def __init__(self, bench: Bench, batch: int, context: int) -> None:
        per = -(-context // PAGE)
        table = np.zeros((batch, decode.MAX_CONTEXT // PAGE), np.int32)
        table[:, :per] = np.random.default_rng(0).permutation(batch * per).reshape(batch, per)
        slots = (table[:, per - 1] * PAGE + (context - 1) % PAGE).astype(np.int32)
        ends, lens = np.arange(batch + 1, dtype=np.int32), np.full(batch, context, np.int32)
        angle = np.random.default_rng(1).standard_normal((batch, DIM // 2), np.float32)
        turns = np.concatenate([np.cos(angle), np.sin(angle)], 1)
        at, self._places = bench.small.address + (400 << 20), []
        for array in (turns, slots, table, ends, lens):
            self._places.append(at)
            array = np.ascontiguousarray(array)
            bench.stream.copy_in(at, array.ctypes.data, array.nbytes)
            bench.stream.wait()
            at += -(-array.nbytes // 256) * 256
        self._size = batch * per * PAGE * KV_HEADS * DIM * 2
        self._memory = Memory(2 * chain.LAYERS * self._size)
        chain.fill(bench, self._memory, "bfloat16")

    def inputs(self, layer: int, qkv: int) -> list[int]:
        heads = [qkv, qkv + HEADS * DIM * 2, qkv + (HEADS + KV_HEADS) * DIM * 2]
        kv = [self._memory.address + (2 * layer + j) * self._size for j in (0, 1)]
        return [*heads, self._places[0], *kv, *self._places[1:], 0, 0, 0, 0]

    def close(self) -> None:
        self._memory.close()


class Step(chain.Chain):
    """A chain with attention between its first and its second product."""

    def __init__(
        self,
        bench: Bench,
        tokens: int,
        products: Mapping[chain.Op, chain.Chosen],
        attention: tuple[Work, ...],
        caches: Caches,
    ) -> None:
        super().__init__(bench, tokens, products)
        self._attention, self._caches = attention, caches

    def step(self) -> list[Any]:
        launches: list[Any] = []
        at, small = self._bench.big.address, self._bench.small.address
        x, y, wide, logits = (small + i * (96 << 20) for i in range(4))
        gain, attended = small + (390 << 20), small + (440 << 20)
        dims = {"T": self._tokens, "B": self._tokens, "B+1": self._tokens + 1}
        for layer in range(chain.LAYERS):
            for op, source, residual, target in (
                (chain.STEP[0], x, gain, wide),
                (chain.STEP[1], attended, x, y),
                (chain.STEP[2], y, gain, wide),
                (chain.STEP[3], wide, y, x),
            ):
                self._tell(layer, op, at)
                launches += self._bound(op, [source, at, 0, residual], target)
                at += self._products[op].weight_bytes
                if op == chain.STEP[0]:
                    inputs = self._caches.inputs(layer, target)
                    launches += [self._bench.bind(w, dims, inputs, [attended]) for w in self._attention]
        return launches + self._bound(chain.HEAD, [x, at, 0, gain], logits)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="1,2,4,8,16")
    parser.add_argument("--context", default="256,1024")
    parser.add_argument("--quant", default="bfloat16")
    parser.add_argument("--head", default="bfloat16")
    args = parser.parse_args()
    sizes = [int(size) for size in args.tokens.split(",")]
    products = {
        t: {op: chain.chosen(op, t, args.quant, "float32") for op in chain.STEP}
        | {chain.HEAD: chain.chosen(chain.HEAD, t, args.head, "float32")}
        for t in sizes
    }
    attentions = {t: attention_of(t) for t in sizes}
    bench = bench_of(
        [*(w for step in products.values() for p in step.values() for w in p.works)]
        + [w for works in attentions.values() for w in works],
        products,
        args.quant,
    )
    for tokens in sizes:
        without = chain.Chain(bench, tokens, products[tokens]).microseconds(overlap=True)
        for context in map(int, args.context.split(",")):
            caches = Caches(bench, tokens, context)
            step = Step(bench, tokens, products[tokens], attentions[tokens], caches)
            us = step.microseconds(overlap=True)
            caches.close()
            print(
                f"{tokens:>4} x {context:<5} {without:9.1f} us without, {us:9.1f} with attention: "
                f"{(us - without) / chain.LAYERS:6.2f} a layer",
                flush=True,
            )


def bench_of(works: list[Work], products: Mapping[int, Mapping[chain.Op, chain.Chosen]], quant: str) -> Bench:
    """With the kernels of ``works`` and memory for the weights."""
    sources = list(dict.fromkeys(w.kernel for w in works if isinstance(w, LaunchSpec)))
    with ProcessPoolExecutor(cores()) as pool:  # forked before anything here has a thread or a context
        cubins = dict(zip(sources, pool.map(compile_or_none, sources), strict=True))
    size = max(chain.LAYERS * sum(step[op].weight_bytes for op in chain.STEP) for step in products.values())
    bench = Bench(
        {s: c for s, c in cubins.items() if c is not None},
        big_bytes=size + 2 * chain.VOCAB * chain.WIDTH + (1 << 20),
    )
    chain.fill(bench, bench.big, quant)
    chain.fill(bench, bench.small, "bfloat16")
    return bench


if __name__ == "__main__":
    main()
