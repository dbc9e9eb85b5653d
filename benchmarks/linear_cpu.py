"""Speed of the native linear kernels on SmolLM2-135M's shapes.

    python benchmarks/linear_cpu.py [--threads 2] [--quants q4_1,q8_0] [--tokens 1,8,256] [--f32]

Each shape runs as a plan of many linears with a weight of their own each, more bytes than a cache
holds, as in a model; a figure is the median over rounds of the mean time of one. "read" is what numpy
reads from memory with as many threads, the ceiling of one token; on a shared machine both move together.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable

import numpy as np

from pelton.dtypes import is_dense
from pelton.engine.batch import AttentionMetadata, InputBatch
from pelton.engine.native_plan import NativePlan
from pelton.engine.plan import Buffer, Instruction, Operand, Plan, TacticChoice
from pelton.ir.block_encoder import quantize
from pelton.ir.tensors import HostTensor
from pelton.kernels import native
from pelton.kernels.layouts import LAYOUTS
from pelton.kernels.linear.workspace import int8_bytes

SHAPES = {
    "qkv": (960, 576),
    "o": (576, 576),
    "gate_up": (3072, 576),
    "down": (576, 1536),
    "head": (49152, 576),
}
MAX_LOGITS_ROWS = 8
WORKING_SET = 96 << 20


def packed_weight(quant: str, shape: tuple[int, int]) -> np.ndarray:
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    if quant == "bfloat16":
        tensor = HostTensor(quant, shape, (values.view(np.uint32) >> 16).astype(np.uint16))
    elif is_dense(quant):
        tensor = HostTensor(quant, shape, values.astype(quant))
    else:
        tensor = quantize(values, quant)
    return LAYOUTS["x16"].pack(tensor)


def linear_plan(tactic: str, quant: str, rows: int, cols: int, copies: int, tokens: int) -> Plan:
    """`copies` linears from one input to one output, then the row that the step contract wants."""
    x_bytes, y_bytes = tokens * cols * 4, tokens * rows * 4
    y_at = -(-x_bytes // 64) * 64
    end = y_at + -(-y_bytes // 64) * 64

    def matrix(name: str, dim: str, width: int, offset: int, nbytes: int) -> Buffer:
        return Buffer(
            name=name, kind="arena", dtype="float32", shape=(dim, width), offset=offset, nbytes=nbytes
        )

    buffers = [
        matrix("x", "T", cols, 0, x_bytes),
        matrix("y", "T", rows, y_at, y_bytes),
        Buffer(name="logits_indices", kind="input", dtype="int32", shape=("N",)),
        matrix("logits", "N", rows, end, rows * 4),
    ]
    operands = [
        Operand(name="x", buffer=0, shape=("T", cols), strides=(cols, 1)),
        Operand(name="y", buffer=1, shape=("T", rows), strides=(rows, 1)),
        Operand(name="index", buffer=2, shape=("N",), strides=(1,)),
        Operand(name="logits", buffer=3, shape=("N", rows), strides=(rows, 1)),
    ]
    choice = (TacticChoice(max_tokens=tokens, tactic=tactic),)
    instructions = []
    for i in range(copies):
        shape = (rows, cols)
        buffers.append(
            Buffer(name=f"w{i}", kind="weight", dtype="uint8", shape=shape, quant=quant, layout="x16")
        )
        operands.append(Operand(name=f"w{i}", buffer=len(buffers) - 1, shape=shape, strides=(cols, 1)))
        instructions.append(
            Instruction(
                op="linear",
                name=f"linear{i}",
                inputs=(0, len(operands) - 1, -1),
                outputs=(1,),
                tactics=choice,
            )
        )
    take = (TacticChoice(max_tokens=tokens, tactic="cpu.take_rows"),)
    instructions.append(Instruction(op="take_rows", name="take", inputs=(1, 2), outputs=(3,), tactics=take))
    return Plan(
        dims={"T": tokens, "B": 1, "N": 1},
        buffers=tuple(buffers),
        operands=tuple(operands),
        instructions=tuple(instructions),
        logits=3,
        arena_bytes=end + rows * 4,
        workspace_bytes=int8_bytes(tokens, cols),
    )


def one_step(tokens: int) -> InputBatch:
    zeros = np.zeros(tokens, np.int32)
    meta = AttentionMetadata(
        slot_mapping_T=zeros - 1,
        block_table_BM=np.zeros((1, 1), np.int32),
        cu_seqlens=np.array([0, tokens], np.int32),
        seq_lens_B=np.array([tokens], np.int32),
    )
    return InputBatch(
        input_ids_T=zeros,
        positions_T=zeros,
        groups=(meta,),
        logits_indices_N=np.array([tokens - 1], np.int32),
    )


def median_seconds(run: Callable[[], object], at_least: float = 0.4) -> float:
    run()
    times: list[float] = []
    while sum(times) < at_least or len(times) < 5:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def read_bandwidth(threads: int) -> float:
    """GB/s of `threads` threads summing memory (numpy releases the lock while it does)."""
    parts = [np.ones(WORKING_SET // 8 // threads, np.uint64) for _ in range(threads)]

    def run() -> None:
        workers = [threading.Thread(target=part.sum) for part in parts]
        for w in workers:
            w.start()
        for w in workers:
            w.join()

    return WORKING_SET / median_seconds(run) * 1e-9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quants", default="q4_1,q8_0")
    parser.add_argument("--tokens", default="1,8,256")
    parser.add_argument("--f32", action="store_true", help="float32 activations with block weights")
    args = parser.parse_args()
    ceiling = read_bandwidth(args.threads)
    print(f"{native.cpu_level()}, {args.threads} threads, read {ceiling:.1f} GB/s")
    for quant in args.quants.split(","):
        suffix = "" if is_dense(quant) else ".f32" if args.f32 else ".int8"
        tactic = f"cpu.linear.{quant}.x16{suffix}"
        for name, (rows, cols) in SHAPES.items():
            weight = packed_weight(quant, (rows, cols))
            copies = max(1, min(60, WORKING_SET // weight.nbytes))
            weights = {f"w{i}": weight.copy() for i in range(copies)}
            for tokens in map(int, args.tokens.split(",")):
                if name == "head" and tokens > MAX_LOGITS_ROWS:
                    continue
                few = max(1, copies // tokens) if tokens > MAX_LOGITS_ROWS else copies
                plan = linear_plan(tactic, quant, rows, cols, few, tokens)
                runner = NativePlan(plan, weights, [], [], threads=args.threads)
                batch = one_step(tokens)
                seconds = median_seconds(lambda r=runner, b=batch: r.run(b)) / few
                runner.close()
                rate, macs = weight.nbytes / seconds * 1e-9, tokens * rows * cols / seconds * 1e-9
                share = f" ({rate / ceiling:4.0%} of read)" if tokens == 1 else ""
                print(
                    f"{tactic:26} {name:8} {rows:5}x{cols:<4} tokens {tokens:3}"
                    f" {seconds * 1e6:9.1f} us {rate:6.1f} GB/s{share:15} {macs:7.1f} GMAC/s"
                )


if __name__ == "__main__":
    main()
