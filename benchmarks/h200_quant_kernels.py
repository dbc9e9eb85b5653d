"""Products with packed weights at Llama-3.1-8B's shapes: those that builds take, or a sweep of tiles.

    python benchmarks/h200_quant_kernels.py --chosen [--types bfloat16,nvfp4] [--tokens 1,16] [--json FILE]
    python benchmarks/h200_quant_kernels.py [--types int4_g128,fp8_row] [--tokens 1,16] [--top 2] [--compile]

As ``h200_kernels.py``: microseconds of a launch in a CUDA graph over copies of the weight that L2 does not
hold, and the share of the floor, the format's own bytes at 4.3 TB/s or the operations at 790 TFLOP/s.
``--compile`` only fills Triton's cache, in processes, without a GPU.

``--chosen``: of each type, bfloat16 among them, the tactic that is taken without timing for exact inputs,
kernels overlapping as in a step; o and down add a residual, gate and up end with the activation. In the end
a layer's products together: the share of the sum of their floors, the time in bfloat16's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from h200_kernels import BANDWIDTH, SHAPES, Bench, Variant, compile_or_none, operand

from pelton.dtypes import BLOCK_TYPES
from pelton.engine.resources import cores
from pelton.ir.block_encoder import quantize
from pelton.ir.tensors import HostTensor, f32_to_bf16
from pelton.kernels.launch import Argument, CallSpec, LaunchSpec, OperandSpec, Work
from pelton.kernels.layouts import LAYOUTS
from pelton.kernels.linear.packed import packed, unpacked
from pelton.kernels.linear.packed_few import FewTiles, clusters_and_stages, few
from pelton.kernels.linear.packed_tiles import PackedTiles, unit_columns
from pelton.kernels.linear.packed_wide import WIDE_STEPS, wide, wide_tiles
from pelton.kernels.linear.products import Form
from pelton.kernels.linear.tiles import PROCESSORS
from pelton.kernels.tactic import NodeSpec, TensorSpec, all_tactics

_OPS = 790e12


def packed_call(quant: str, n: int, k: int, *, gated: bool = False) -> CallSpec:
    weight = OperandSpec(dtype="uint8", shape=(n, k), strides=(k, 1), quant=quant)
    out = operand("T", n // 2 if gated else n)
    return CallSpec(inputs=(operand("T", k), weight, None), outputs=(out,), attrs={"kind": "silu"})


def floor_us(quant: str, m: int, n: int, k: int) -> float:
    """Of the format's own bytes, as checkpoints hold them, or of the operations."""
    row = 2 * k if quant == "bfloat16" else BLOCK_TYPES[quant].row_bytes(k)
    return 1e6 * max(n * row / BANDWIDTH, 2 * m * n * k / _OPS)


#: Worth trying up to so many tokens: tokens, panels, units, programs a multiprocessor, stages, warps.
TRIED = {
    16: (
        (16, 4, 1, 3, 4, 4),
        (16, 4, 1, 4, 4, 4),
        (16, 4, 2, 2, 3, 4),
        (16, 4, 2, 3, 3, 4),
        (16, 8, 1, 2, 4, 4),
        (16, 8, 1, 3, 3, 4),
        (8, 4, 2, 3, 3, 4),
        (8, 4, 2, 4, 3, 4),
    ),
    64: ((64, 4, 1, 2, 4, 4), (64, 8, 1, 1, 4, 4), (64, 8, 1, 1, 4, 8)),
    256: ((128, 4, 1, 1, 4, 4), (128, 8, 1, 1, 3, 8), (256, 8, 1, 1, 2, 8)),
}


def tiles_of(quant: str, m: int, n: int, k: int, *, gated: bool) -> Iterator[PackedTiles]:
    """Worth trying."""
    base = unit_columns(quant, 128)
    for bm, p, units, share, stages, warps in TRIED[min(t for t in TRIED if m <= t)]:
        if m > 8 and bm < 16:
            continue
        halves = 2 if gated else 1
        steps = -(-n // (16 * p * halves)) * -(-k // (base * units))
        programs = min(share * PROCESSORS, steps // 2)
        p = p // halves if bm > 64 and p > 4 else p
        yield PackedTiles(bm, p, base, units, programs, stages, warps)


#: Splits, parts, panels of a part, blocks of a cluster, groups: worth trying up to so many tokens.
TRIED_FEW = {
    1: ((16, 1, 3, 1, 2), (16, 1, 2, 1, 2), (16, 1, 1, 1, 2), (16, 1, 2, 1, 1)),
    8: ((8, 2, 3, 2, 2), (8, 2, 2, 2, 2), (8, 2, 1, 2, 2), (14, 1, 2, 2, 2), (14, 1, 2, 4, 2)),
    16: ((8, 2, 2, 2, 2), (8, 1, 1, 2, 2), (10, 1, 2, 4, 2), (14, 1, 1, 4, 2)),
}


def variants(quants: list[str], tokens: list[int], shapes: list[str], kinds: set[str]) -> Iterator[Variant]:
    for quant, name, m in itertools.product(quants, shapes, tokens):
        n, k = SHAPES[name]
        form = Form(gated=name == "gate_up")
        call = packed_call(quant, n, k, gated=form.gated)
        floor = floor_us(quant, m, n, k)
        tried: list[tuple[dict[str, Any], tuple[Work, ...]]] = []
        if "few" in kinds and m <= 16:
            held = next(t for t in TRIED_FEW if m <= t)
            for shape in TRIED_FEW[held]:
                few_tiles = FewTiles(held, *shape)
                if clusters_and_stages(form, n // 2 if form.gated else n, k, quant, few_tiles)[1]:
                    tried.append((asdict(few_tiles), (few(form, call, few_tiles),)))
        if "wide" in kinds and 16 < m <= WIDE_STEPS[-1]:
            step = next(t for t in WIDE_STEPS if m <= t)
            wide_used = wide_tiles(n // 2 if form.gated else n, step, form.gated, quant)
            tried.append(({"wide": 1, **asdict(wide_used)}, wide(form, call, wide_used, m)))
        if "packed" in kinds:
            for tiles in tiles_of(quant, m, n, k, gated=form.gated):
                tried.append((asdict(tiles), packed(form, call, tiles, m)))
        if "unpack" in kinds and m >= 64:
            tried.append(({"unpack": 1}, unpacked(form, call, m)))
        for tiles_used, works in tried:
            yield Variant(f"{quant} {name}", m, tiles_used, works, {"T": m}, floor)


#: Of each shape, the op and its residual.
OPS = {"qkv": "linear", "o": "linear_add", "gate_up": "linear_gated", "down": "linear_add"}


def chosen(quants: list[str], tokens: list[int], shapes: list[str]) -> Iterator[Variant]:
    """What builds take without timing on sm_90."""
    tactics = sorted((t for t in all_tactics().values() if t.device == "cuda"), key=lambda t: t.order)
    for quant, name, m in itertools.product(quants, shapes, tokens):
        (n, k), gated = SHAPES[name], OPS[name] == "linear_gated"
        packed_type = "" if quant == "bfloat16" else quant
        weight = OperandSpec(
            dtype="uint8" if packed_type else quant, shape=(n, k), strides=(k, 1), quant=packed_type
        )
        out = operand("T", n // 2 if gated else n)
        inputs = (operand("T", k), weight, None, *([out] if OPS[name] == "linear_add" else []))
        call = CallSpec(inputs=inputs, outputs=(out,), attrs={"kind": "silu"} if gated else {})
        specs = [i and TensorSpec(dtype=i.dtype, shape=i.shape, quant=i.quant) for i in inputs]
        node = NodeSpec(op=OPS[name], inputs=tuple(specs), attrs=call.attrs, activations="bfloat16")
        fitting = [
            t
            for t in tactics
            if t.op == node.op and not t.batch_invariant and t.precision == "bfloat16"
            if t.launches is not None and t.supports(node)
        ]
        layout = fitting[0].weight_layouts  # a weight lies in one for steps of any size
        tactic = next(t for t in fitting if t.takes(m) and t.weight_layouts == layout)
        assert tactic.launches is not None
        floor = floor_us(quant, m, n, k)
        used = {"tactic": tactic.name, "layout": layout.get(1, "rows")}
        yield Variant(f"{quant} {name}", m, used, tactic.launches(call, m), {"T": m}, floor)


class QuantBench(Bench):
    """Also runs products that are left to cuBLASLt."""

    def bind(self, work: Work, dims: dict[str, int], inputs: list[int], outputs: list[int]) -> Any:
        if isinstance(work, LaunchSpec):
            return super().bind(work, dims, inputs, outputs)

        def address(argument: Argument) -> int:
            if argument.kind == "workspace":
                return int(self.workspace.address) + argument.offset
            return (inputs if argument.kind == "input" else outputs)[argument.index]

        arguments = {f: getattr(work, f) for f in ("n", "k", "x_row", "dtype", "out_dtype")}
        places = {f: address(getattr(work, f)) for f in ("x", "weight", "out")}
        if work.residual is not None:
            places |= {"residual": address(work.residual)}
            arguments |= {"residual_row": work.residual_row}
        return lambda: self.cublas.matmul(self.stream, tokens=dims["T"], **arguments, **places)


def addresses(bench: Bench, quant: str, n: int, k: int) -> list[tuple[list[int], list[int]]]:
    size = -(-LAYOUTS["mma16"].nbytes(quant, (n, k)) // 256) * 256
    copies = max(2, min(48, (512 << 20) // size))
    return [
        ([bench.small.address, bench.big.address + i * size, 0], [bench.small.address + (256 << 20)])
        for i in range(copies)
    ]


def table(bench: QuantBench, found: list[Variant]) -> list[dict[str, Any]]:
    """Times what is chosen, of real weights, and prints it."""
    rows, bench.overlap = [], True
    for what, group in itertools.groupby(found, key=lambda v: v.what):
        quant, name = what.split()
        n, k = SHAPES[name]
        timed = list(group)
        data = weight_bytes(quant, n, k, timed[0].tiles["layout"])
        size = -(-data.nbytes // 4096) * 4096
        small, copies = bench.small.address, max(2, min(48, (512 << 20) // size))
        inputs = [[small, bench.big.address + i * size, 0, small + (384 << 20)] for i in range(copies)]
        bench.stream.copy_in(inputs[0][1], data.ctypes.data, data.nbytes)
        for _, weight, *_ in inputs[1:]:
            bench.stream.copy(weight, inputs[0][1], data.nbytes)
        bench.stream.wait()
        line = f"{quant:<10}{name:<8}"
        for variant in timed:
            us = bench.microseconds(variant, [(i, [small + (512 << 20)]) for i in inputs])
            rows.append({"what": what, "size": variant.size, "us": round(us, 2), "floor": variant.floor_us})
            rows[-1] |= variant.tiles
            line += f"{us:>8.1f} {variant.floor_us / us:>4.0%}"
        print(line, flush=True)
    return rows


def layers(rows: list[dict[str, Any]], tokens: list[int]) -> None:
    """Prints each type's products of a layer together: their floors' share, the time in bfloat16's."""
    times: dict[tuple[str, int], float] = {}
    floors: dict[tuple[str, int], float] = {}
    for row in rows:
        key = row["what"].split()[0], row["size"]
        times[key] = times.get(key, 0.0) + row["us"]
        floors[key] = floors.get(key, 0.0) + row["floor"]
    print(f"{'a layer':<12}" + "".join(f"{m:>13}" for m in tokens))
    for quant in dict.fromkeys(quant for quant, _ in times):
        cells = []
        for m in tokens:
            us, dense = times[quant, m], times.get(("bfloat16", m))
            cells.append(f"{floors[quant, m] / us:.0%}" + (f" {us / dense:.2f}" if dense else ""))
        print(f"{quant:<12}" + "".join(f"{cell:>13}" for cell in cells))


def weight_bytes(quant: str, n: int, k: int, layout: str) -> np.ndarray[Any, Any]:
    """Normally distributed values, 64 rows again and again, as the kernels read them."""
    part = np.random.default_rng(0).standard_normal((64, k), dtype=np.float32) * np.float32(0.02)
    if quant == "bfloat16":
        return np.tile(f32_to_bf16(part), (n // 64, 1)).view(np.uint8)
    rows = quantize(part, quant)
    if layout == "mma16":  # panel after panel
        return np.tile(LAYOUTS[layout].pack(rows).reshape(-1), n // 64)
    data = np.tile(rows.data.reshape(64, -1), (n // 64, 1))
    return LAYOUTS[layout].pack(HostTensor(quant, (n, k), data)).reshape(-1)


def fill(bench: Bench) -> None:
    """Random bytes, as weights and activations have; bfloat16 activations between 0.5 and 2."""
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, 64 << 20, dtype=np.uint8)
    for i in range(10):
        bench.stream.copy_in(bench.big.address + i * data.nbytes, data.ctypes.data, data.nbytes)
    x = (0x3F00 + rng.integers(0, 256, 32 << 20, dtype=np.uint16)).astype(np.uint16)
    bench.stream.copy_in(bench.small.address, x.ctypes.data, x.nbytes)
    bench.stream.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", default="int4_g128,fp8_row")
    parser.add_argument("--tokens", default="1,8,16,32,64,128,256")
    parser.add_argument("--shapes", default="qkv,o,gate_up,down")
    parser.add_argument("--kinds", default="few,wide,packed,unpack")
    parser.add_argument("--top", type=int, default=2)
    parser.add_argument("--chosen", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tokens = [int(t) for t in args.tokens.split(",")]
    kinds = set(args.kinds.split(","))
    types, shapes = args.types.split(","), args.shapes.split(",")
    found = list(chosen(types, tokens, shapes) if args.chosen else variants(types, tokens, shapes, kinds))
    sources = list(dict.fromkeys(w.kernel for v in found for w in v.works if isinstance(w, LaunchSpec)))
    print(f"{len(found)} variants, {len(sources)} kernels", flush=True)
    with ProcessPoolExecutor(cores()) as pool:
        compiled = dict(zip(sources, pool.map(compile_or_none, sources), strict=True))
    cubins = {source: cubin for source, cubin in compiled.items() if cubin is not None}
    print(f"{len(cubins)} compiled", flush=True)
    if args.compile:
        return
    bench = QuantBench(cubins, big_bytes=(1 if args.chosen else 6) << 30)
    if args.chosen:
        print(f"{'type':<10}{'shape':<8}" + "".join(f"{m:>8}     " for m in tokens))
        rows = table(bench, found)
        layers(rows, tokens)
        if args.json:
            args.json.write_text(json.dumps(rows))
        return
    fill(bench)
    rows = []
    for (what, size), group in itertools.groupby(found, key=lambda v: (v.what, v.size)):
        quant, name = what.split()
        places = addresses(bench, quant, *SHAPES[name])
        timed = []
        for variant in group:
            if all(not isinstance(w, LaunchSpec) or w.kernel in cubins for w in variant.works):
                us = bench.microseconds(variant, places)
                timed.append(
                    {"what": what, "size": size, "us": us, "floor": variant.floor_us} | variant.tiles
                )
        rows += timed
        for row in sorted(timed, key=lambda r: r["us"])[: args.top]:
            tiles = {k: v for k, v in row.items() if k not in ("what", "size", "us", "floor")}
            listed = ",".join(f"{k[:2]}{v}" for k, v in tiles.items())
            share = row["floor"] / row["us"]
            print(f"{what:<20}{size:>5}{row['us']:>8.2f} us {share:>5.0%}  {listed}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
