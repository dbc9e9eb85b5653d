"""Sweeps tiles of the GPU kernels at Llama-3.1-8B's shapes: what ``kernels/*/cuda.py`` chooses among.

    python benchmarks/h200_kernels.py [--only gemv,stream,cublaslt,attention,prefill] [--json FILE]

Each variant runs in a CUDA graph over enough copies of its weights that none is found in L2. Microseconds of
a launch, and its share of the floor: bytes that must move at 4.3 TB/s, operations at 790 TFLOP/s.
"""

from __future__ import annotations

import argparse
import ctypes as C
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pelton.builder.cubins import Cubin, compile_kernel
from pelton.engine.resources import cores
from pelton.errors import PeltonError
from pelton.kernels.gpu.cublaslt import CublasLt
from pelton.kernels.gpu.driver import (
    Device,
    Event,
    Function,
    LaunchConfig,
    Memory,
    Stream,
    capture,
    dependent_launch,
    library,
)
from pelton.kernels.gpu.tensor_maps import tensor_map
from pelton.kernels.launch import COUNTER_BYTES, CallSpec, LaunchSpec, OperandSpec, Source
from pelton.kernels.linear.products import Form, gemv, stream
from pelton.kernels.linear.tiles import PROCESSORS, GemvTiles, StreamTiles
from pelton.kernels.paged_attention import hopper
from pelton.kernels.paged_attention.cuda import Tiles, attention

BANDWIDTH = 4.3e12
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
SHAPES["lm_head"] = (128256, 4096)
HEADS, KV_HEADS, DIM, CONTEXT = 32, 8, 128, 1024


@dataclass
class Variant:
    """One thing to time: launches over operands at addresses."""

    what: str
    size: int
    tiles: Mapping[str, int]
    works: tuple[Any, ...]
    dims: dict[str, int]
    floor_us: float


def operand(*shape: int | str, dtype: str = "bfloat16") -> OperandSpec:
    """Contiguous."""
    strides, n = [], 1
    for size in reversed(shape):
        strides.append(n)
        n *= size if isinstance(size, int) else 1
    return OperandSpec(dtype=dtype, shape=shape, strides=tuple(reversed(strides)))


def linear_call(n: int, k: int) -> CallSpec:
    return CallSpec(inputs=(operand("T", k), operand(n, k), None), outputs=(operand("T", n),))


def linear_variants(kinds: set[str]) -> Iterator[Variant]:
    for name, (n, k) in SHAPES.items():
        floor = 1e6 * 2 * n * k / BANDWIDTH
        call = linear_call(n, k)
        if "gemv" in kinds:
            for bn, bk, share, stages, warps in itertools.product(
                (2, 4, 8), (1024, 2048), (2, 3, 4), (3, 4, 5), (2, 4)
            ):
                if bn * bk * stages * share * 2 > 200_000 or bn * bk > warps * 4096:
                    continue
                gemv_tiles = GemvTiles(bn, bk, share * PROCESSORS, stages, warps)
                work = gemv(Form(), call, gemv_tiles)
                yield Variant(f"gemv {name}", 1, asdict(gemv_tiles), (work,), {"T": 1}, floor)
        if "stream" in kinds:
            for m, bn, bk, share, stages, warps in itertools.product(
                (8, 32, 64), (32, 64, 128, 256), (64, 128), (1, 2, 3), (3, 4, 5), (4, 8)
            ):
                if (bn + m) * bk * stages * share * 2 > 210_000 or bn * m > warps * 4096:
                    continue
                tiles = StreamTiles(m, bn, bk, share * PROCESSORS, stages, warps)
                works = stream(Form(), call, tiles, m)
                yield Variant(f"stream {name}", m, asdict(tiles), works, {"T": m}, floor)


def attention_variants() -> Iterator[Variant]:
    for batch in (1, 8, 32, 64, 128, 256):
        floor = 1e6 * batch * CONTEXT * KV_HEADS * DIM * 4 / BANDWIDTH
        for page in (16, 64):
            call = attention_call(page)
            for keys, splits, stages, warps in itertools.product(
                (16, 32, 64, 128), (1, 2, 4, 8, 16, 32), (2, 4), (1, 2, 4)
            ):
                if not 64 <= batch * KV_HEADS * splits <= 4200 or keys * splits > CONTEXT or keys > 4 * page:
                    continue
                tiles = Tiles(1, keys, splits, stages, warps)
                yield Variant(
                    f"attention page {page}",
                    batch,
                    asdict(tiles),
                    attention(call, tiles, batch),
                    {"T": batch, "B": batch},
                    floor,
                )


#: (new tokens, keys) of each sequence in steps with prefills.
STEPS = {
    "prefill 512": [(512, 512)],
    "prefill 2048": [(2048, 2048)],
    "prefill 8192": [(8192, 8192)],
    "2048 of 8192": [(2048, 8192)],
    "16 prefills of 512": [(512, 512)] * 16,
    "256 decodes + 2048": [(1, CONTEXT)] * 256 + [(2048, 2048)],
}


def prefill_variants() -> Iterator[Variant]:
    call = attention_call(16)
    for name, lens in STEPS.items():
        tokens = sum(new for new, _ in lens)
        dims = {"T": tokens, "B": len(lens)}
        pairs = sum(new * keys - new * (new - 1) // 2 for new, keys in lens)
        bytes_read = sum(keys for _, keys in lens) * KV_HEADS * DIM * 4
        floor = 1e6 * max(4 * pairs * HEADS * DIM / 790e12, bytes_read / BANDWIDTH)
        for stages in (2, 3):
            launch = hopper.attention(call, tokens, stages=stages)
            yield Variant(name, tokens, {"stages": stages}, (launch,), dims, floor)
        for rows, keys, stages, warps in itertools.product((64, 128, 256), (32, 64, 128), (2, 3, 4), (4, 8)):
            if rows * keys > 128 * 128:
                continue
            tiles = Tiles(rows, keys, 1, stages, warps)
            works = attention(call, tiles, tokens)
            yield Variant(name, tokens, asdict(tiles), works, dims, floor)


def attention_call(page: int) -> CallSpec:
    cache = operand("P", KV_HEADS, page, DIM)
    index = operand("B", 8192 // page, dtype="int32")
    return CallSpec(
        inputs=(
            operand("T", HEADS, DIM),
            cache,
            cache,
            index,
            operand("B+1", dtype="int32"),
            operand("B", dtype="int32"),
            *[None] * 3,
        ),
        outputs=(operand("T", HEADS, DIM),),
        attrs={"scale": DIM**-0.5, "window": 0, "softcap": 0.0},
    )


class Bench:
    """Memory and kernels for one variant after another."""

    def __init__(self, cubins: dict[Source, Cubin], big_bytes: int = 6 << 30) -> None:
        self.device, self.stream = Device(), Stream()
        self.overlap = False
        """Whether kernels that can are launched while the one before them runs."""
        self.cubins = cubins
        self.big = Memory(big_bytes)
        self.small = Memory(1 << 30)
        self.workspace = Memory(COUNTER_BYTES + (512 << 20))
        self.workspace.fill(0, self.stream)
        # Never zeros: a GPU multiplies them with less power, and so faster.
        block = np.random.default_rng(0).standard_normal(16 << 20).astype(np.float32).view(np.uint32) >> 16
        values = block.astype(np.uint16)
        for memory in (self.big, self.small):
            for offset in range(0, memory.nbytes, values.nbytes):
                nbytes = min(values.nbytes, memory.nbytes - offset)
                self.stream.copy_in(memory.address + offset, values.ctypes.data, nbytes)
        self.stream.wait()
        self.cublas = CublasLt()
        self.ahead = (0, 0, 0)
        """What launches are told of the next weight (``kernels.launch.Argument``)."""
        self.overlap = False
        """Whether kernels that can begin while the one before them runs."""
        self.functions: dict[Source, Function] = {}

    def linear_addresses(self, n: int, k: int) -> list[tuple[list[int], list[int]]]:
        """(inputs, outputs) of several copies of the weight."""
        copies = max(2, min(24, (512 << 20) // (2 * n * k)))
        return [
            ([self.small.address, self.big.address + i * 2 * n * k, 0], [self.small.address + (256 << 20)])
            for i in range(copies)
        ]

    def attention_addresses(
        self, page: int, lens: Sequence[tuple[int, int]]
    ) -> list[tuple[list[int], list[int]]]:
        """``lens``: (new tokens, keys) of each sequence."""
        need = [-(-keys // page) for _, keys in lens]
        table = np.zeros((len(lens), 8192 // page), np.int32)
        blocks = np.random.default_rng(0).permutation(sum(need))
        for row, end, n in zip(table, itertools.accumulate(need), need, strict=True):
            row[:n] = blocks[end - n : end]
        where = self.small.address + (512 << 20)
        ends = np.cumsum([0, *(new for new, _ in lens)], dtype=np.int32)
        arrays = [table, ends, np.array([keys for _, keys in lens], np.int32)]
        places = []
        for array in arrays:
            self.stream.copy_in(where, array.ctypes.data, array.nbytes)
            self.stream.wait()
            places.append(where)
            where += -(-array.nbytes // 64) * 64
        cache = sum(need) * page * KV_HEADS * DIM * 2
        copies = max(1, min(24, (512 << 20) // (2 * cache)))
        return [
            (
                [
                    self.small.address,
                    self.big.address + 2 * i * cache,
                    self.big.address + (2 * i + 1) * cache,
                    *places,
                ],
                [self.small.address + (256 << 20)],
            )
            for i in range(copies)
        ]

    def microseconds(self, variant: Variant, addresses: list[tuple[list[int], list[int]]]) -> float:
        launches = [self.bind(work, variant.dims, *pair) for pair in addresses for work in variant.works]
        repeats = max(1, 24 // len(addresses))
        with capture(self.stream) as captured:
            for _ in range(repeats):
                for launch in launches:
                    launch()
        graph = captured.graph
        assert graph is not None
        a, b = Event(timing=True), Event(timing=True)
        best = float("inf")
        for _ in range(4):
            a.record(self.stream)
            graph.launch(self.stream)
            b.record(self.stream)
            b.wait()
            best = min(best, b.milliseconds_since(a))
        graph.close()
        return 1e3 * best / (repeats * len(addresses))

    def bind(
        self,
        work: LaunchSpec,
        dims: dict[str, int],
        inputs: list[int],
        outputs: list[int],
    ) -> Any:
        source = work.kernel
        cubin = self.cubins[source]
        if source not in self.functions:
            self.functions[source] = Function(cubin.image, cubin.name, max(cubin.shared, work.footprint))
        function = self.functions[source]
        values: list[Any] = []
        for argument in work.arguments:
            match argument.kind:
                case "input":
                    values.append(C.c_uint64(inputs[argument.index]))
                case "output":
                    values.append(C.c_uint64(outputs[argument.index]))
                case "workspace":
                    values.append(C.c_uint64(self.workspace.address + argument.offset))
                case "dim":
                    values.append(C.c_int32(dims[argument.dim]))
                case "float":
                    values.append(C.c_float(argument.value))
                case "ahead":
                    values.append(
                        (C.c_uint64, C.c_int32, C.c_int32)[argument.index](self.ahead[argument.index])
                    )
                case "tensor_map":
                    assert argument.map is not None
                    place = self.workspace.address + argument.offset
                    if argument.of != "workspace":
                        place = (inputs if argument.of == "input" else outputs)[argument.index]
                    values.append(tensor_map(place, argument.map))
                case _:
                    values.append(C.c_int32(int(argument.value)))
        values += [C.c_uint64(0)] * cubin.scratch
        parameters = (C.c_void_p * len(values))(*(C.addressof(v) for v in values))
        config = LaunchConfig()
        grid = [sum(t.value(dims) for t in axis) for axis in work.grid]
        config.grid[:] = grid + [1] * (3 - len(grid))
        config.block[:] = (cubin.threads, 1, 1)
        footprint = work.footprint if self.overlap else 0
        config.shared, config.stream = max(cubin.shared, footprint), self.stream.handle
        if source.dependent and self.overlap:
            attribute = dependent_launch()
            config.attributes, config.n_attributes = C.pointer(attribute), 1

        def launch(keep: Any = values) -> None:
            code = library().cuLaunchKernelEx(C.byref(config), function.handle, parameters, None)
            assert code == 0, f"launch failed: {code}"

        return launch


def compile_or_none(source: Source) -> Cubin | None:
    try:
        return compile_kernel(source, 90)
    except PeltonError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="gemv,stream,cublaslt,attention")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kinds = set(args.only.split(","))
    variants = [*linear_variants(kinds), *(attention_variants() if "attention" in kinds else ())]
    variants += prefill_variants() if "prefill" in kinds else ()
    sources = list(dict.fromkeys(w.kernel for v in variants for w in v.works))
    print(f"{len(variants)} variants, {len(sources)} kernels", flush=True)
    # Forked before anything here has a thread or a context.
    with ProcessPoolExecutor(cores()) as pool:
        found = dict(zip(sources, pool.map(compile_or_none, sources, chunksize=4), strict=True))
    cubins = {source: cubin for source, cubin in found.items() if cubin is not None}
    print(f"{len(cubins)} compiled", flush=True)
    bench = Bench(cubins)
    rows = []
    for variant in variants:
        if any(
            w.kernel not in cubins or cubins[w.kernel].shared > bench.device.max_shared for w in variant.works
        ):
            continue
        if variant.what.startswith("attention"):
            addresses = bench.attention_addresses(
                int(variant.what.split()[-1]), [(1, CONTEXT)] * variant.size
            )
        elif variant.what in STEPS:
            addresses = bench.attention_addresses(16, STEPS[variant.what])
        else:
            addresses = bench.linear_addresses(*SHAPES[variant.what.split()[1]])
        us = bench.microseconds(variant, addresses)
        rows.append(
            {
                "what": variant.what,
                "size": variant.size,
                "us": round(us, 2),
                "floor": round(variant.floor_us, 2),
                **variant.tiles,
            }
        )
    if "cublaslt" in kinds:
        for name, (n, k) in SHAPES.items():
            for m in (1, 8, 16, 32, 64, 128, 256, 512, 2048, 8192):
                addresses = bench.linear_addresses(n, k)
                if m * n * 2 > (700 << 20):
                    continue
                with capture(bench.stream) as captured:
                    for inputs, outputs in addresses:
                        bench.cublas.matmul(
                            bench.stream,
                            tokens=m,
                            n=n,
                            k=k,
                            x_row=k,
                            dtype="bfloat16",
                            out_dtype="bfloat16",
                            x=inputs[0],
                            weight=inputs[1],
                            out=outputs[0],
                        )
                assert captured.graph is not None
                a, b = Event(timing=True), Event(timing=True)
                best = float("inf")
                for _ in range(4):
                    a.record(bench.stream)
                    captured.graph.launch(bench.stream)
                    b.record(bench.stream)
                    b.wait()
                    best = min(best, b.milliseconds_since(a))
                us = 1e3 * best / len(addresses)
                floor = max(1e6 * 2 * n * k / BANDWIDTH, 1e6 * 2 * m * n * k / 790e12)
                rows.append(
                    {"what": f"cublaslt {name}", "size": m, "us": round(us, 2), "floor": round(floor, 2)}
                )
    best_rows: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        best_rows.setdefault((row["what"], row["size"]), []).append(row)
    for (what, size), group in sorted(best_rows.items()):
        group.sort(key=lambda r: r["us"])
        for row in group[:3]:
            tiles = {k: v for k, v in row.items() if k not in ("what", "size", "us", "floor")}
            print(
                f"{what:<22}{size:>6}{row['us']:>9.1f} us {row['floor'] / row['us']:>6.0%} of floor  {tiles}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
