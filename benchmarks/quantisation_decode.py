"""CPU decode of quantised models beside llama.cpp at about the same bits: the ratios in docs/quantisation.md.

    python benchmarks/quantisation_decode.py MODEL.gguf... [--rounds 7] [--threads 2]

Both have the file's own head and embeddings; the linear layers of the decoder layers are Pelton's block
type here, and the GGUF type of nearest bits there, both made from the file's dequantised weights. Rounds
alternate A B A B; a ratio is the median of the rounds' ratios of median decode steps (batch 1, after 64
tokens). Only ratios are kept: the times are of a shared machine. They go into the rows of
benchmarks/results/quantisation.json, one for each recipe of the same type: an algorithm changes codes, not
their layout.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from cpu import CACHE, Pelton
from llamacpp.peer import LlamaCpp
from quantisation import RESULTS, load, table

import pelton
from pelton.builder.quantized_view import round_in_stream
from pelton.models.checkpoint import open_checkpoint
from pelton.quant.config import QuantConfig
from pelton.quant.recipes import RECIPES

#: Weights of a recipe, whether symmetric -> llama.cpp's type of about the same bits.
COUNTERPARTS = {
    ("int8_row", True): "Q8_0",
    ("int4_g128", True): "Q4_0",
    ("int4_g128", False): "Q4_0",
    ("q8_0", True): "Q8_0",
}
#: Of recipes that no table has: the same types by another group.
EXTRA = {
    "int4_g32 symmetric": QuantConfig(weights="int4_g32"),
    "int4_g32 asymmetric": QuantConfig(weights="int4_g32", symmetric=False),
}
EXTRA_COUNTERPARTS = {"int4_g32 symmetric": "Q4_0", "int4_g32 asymmetric": "Q4_1"}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    for model in given.models:
        with tempfile.TemporaryDirectory(prefix="pelton-decode-") as scratch:
            _measure(model, given, Path(scratch))
    print(table())


def _measure(path: Path, given: argparse.Namespace, scratch: Path) -> None:
    name = open_checkpoint(path).name
    found: dict[tuple[str, bool], dict[str, Any]] = {}
    for (weights, symmetric), peer in COUNTERPARTS.items():
        config = QuantConfig(weights=weights, symmetric=symmetric)
        found[weights, symmetric] = _beside(path, config, peer, given, scratch)
    record = load()
    for recipe, row in record.get(name, {}).items():
        row.update(found.get((RECIPES[recipe].weights, RECIPES[recipe].symmetric), {}))
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    for label, config in EXTRA.items():
        _beside(path, config, EXTRA_COUNTERPARTS[label], given, scratch)


def _beside(
    path: Path, config: QuantConfig, peer: str, given: argparse.Namespace, scratch: Path
) -> dict[str, Any]:
    limits = pelton.BuildConfig(max_batch_size=8, max_seq_len=2048)
    view = round_in_stream(open_checkpoint(path), config)
    pelton.build(view, limits, output=scratch / "engine", check=False)
    other = scratch / f"{peer}.gguf"
    if not other.exists():
        requantised(path, other, peer)
    ours = Pelton(scratch / "engine", given.threads)
    theirs = LlamaCpp(other, given.threads, CACHE / "llamacpp")
    ratios = []
    for round_ in range(given.rounds + 1):
        a = statistics.median(ours.decode(1, 64, 48))
        b = statistics.median(theirs("decode 1 64 48"))
        ratios += [a / b] * (round_ > 0)
    ours.session.close()
    theirs.close()
    ratio = round(statistics.median(ratios), 3)
    print(
        f"{path.name} {config.weights} symmetric={config.symmetric}: {ratio} of {peer} {ratios}", flush=True
    )
    return {"decode_ratio": ratio, "decode_against": peer, "threads": given.threads}


def requantised(source: Path, out: Path, quant: str) -> None:
    """A GGUF file with the decoder layers' matrices in another type; everything else is copied."""
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, architecture)
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        kind, inner = field.types[0], field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), kind, inner)
    wanted = gguf.GGMLQuantizationType[quant]
    for tensor in reader.tensors:
        if tensor.name.startswith("blk.") and len(tensor.shape) == 2:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
