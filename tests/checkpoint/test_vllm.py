"""What vLLM reads of the checkpoints that Pelton writes: its own parsing, schemes, model and weight loader.

vLLM runs in a process of its own, up to its kernels (``vllm_reader.py``). Skipped where it is not installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors import safe_open

import pelton
from pelton.ir.blocks import dequantize
from pelton.models.checkpoint import Checkpoint, open_checkpoint
from pelton.quant.config import QuantConfig
from pelton.quant.recipes import RECIPES, with_fields
from tests.checkpoint.makers import tiny_hf_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler for an empty libcuda.so.1"),
]

#: Widths of whole blocks of 128, as fp8-block has.
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.05,
}
STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
#: vLLM multiplies in float16 here, in which it keeps the float32 scales of packed 8-bit codes.
HALF = 2**-11


class Case(NamedTuple):
    recipe: str
    schemes: tuple[str, ...]
    fmt: str = "compressed-tensors"
    rtol: float = 0
    fields: Mapping[str, Any] = MappingProxyType({})


PACKED, FP8, GPTQ = "CompressedTensorsWNA16", "CompressedTensorsW8A8Fp8", "AutoGPTQLinearMethod"
#: Types of several layers, and layers that stay as they are.
MIXED = {"overrides": {"*.down_proj": "int8_row"}, "ignore": ("*.layers.1.self_attn.*",)}
CASES = {
    "int4": Case("int4", (PACKED,)),
    "int4-asymmetric": Case("int4-asymmetric", (PACKED,)),
    "awq-int4": Case("awq-int4", (PACKED,)),
    "int3": Case("int3", (PACKED,)),
    "int2": Case("int2", (PACKED,)),
    "int8": Case("int8", (PACKED,), rtol=HALF),
    "gptq-int8": Case("gptq-int8", (PACKED,), rtol=HALF),
    "mixed": Case("int4", (PACKED,), rtol=HALF, fields=MIXED),
    "w4a8": Case("w4a8", ("CompressedTensorsWNA8Int",)),
    "w8a8": Case("w8a8", ("CompressedTensorsW8A8Int8",)),
    "smoothquant-static": Case("smoothquant-static", ("CompressedTensorsW8A8Int8",)),
    "fp8-weights": Case("fp8-weights", ("CompressedTensorsW8A16Fp8",)),
    "fp8": Case("fp8", (FP8,)),
    "fp8-tensor": Case("fp8-tensor", (FP8,)),
    "fp8-static": Case("fp8-static", (FP8,)),
    "fp8-block": Case("fp8-block", (FP8,)),
    "fp8-kv": Case("fp8-kv", (FP8,)),
    # One over the scale of a tensor is stored.
    "nvfp4": Case("nvfp4", ("CompressedTensorsW4A4Fp4",), rtol=3e-7),
    "gptq-nvfp4": Case("gptq-nvfp4", ("CompressedTensorsW4A4Fp4",), rtol=3e-7),
    "mxfp4": Case("mxfp4", ("CompressedTensorsW4A4Mxfp4",)),
    "gptq-int4 in GPTQ's layout": Case("gptq-int4", (GPTQ,), "gptq"),
    "int8 in GPTQ's layout": Case("int8", (GPTQ,), "gptq", HALF),
    "mixed in GPTQ's layout": Case("int4", (GPTQ,), "gptq", HALF, MIXED),
}
#: What Pelton writes and vLLM has no code for, with its words.
REFUSED = {
    "smoothquant-tensor": (Case("smoothquant-tensor", ()), "No compressed-tensors compatible scheme"),
    "w4a8-fp8": (Case("w4a8-fp8", ()), "No compressed-tensors compatible scheme"),
    "int8 KV caches": (Case("awq-int4-kv8", ()), "Currently supported kv cache quantization is num_bits=8"),
    "zero points in GPTQ's layout": (
        Case("int4-asymmetric", (), "gptq"),
        "Unsupported quantization config: bits=4, sym=False",
    ),
    "3 bits in GPTQ's layout": (Case("gptq-int3", (), "gptq"), "Unsupported quantization config: bits=3"),
    "one of q, k and v as it is": (
        Case("int4", (), fields={"ignore": ("*.q_proj",)}),
        "different quantization schemes for the shards",
    ),
}


class Read(NamedTuple):
    checkpoint: Checkpoint
    facts: dict[str, Any]
    values: dict[str, Any]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Read]:
    """All cases, written by Pelton and loaded by vLLM."""
    folder = tmp_path_factory.mktemp("vllm")
    base = tiny_hf_checkpoint("llama", folder, **SIZES)
    cases = CASES | {name: case for name, (case, _) in REFUSED.items()}
    for i, case in enumerate(cases.values()):
        config: QuantConfig = with_fields(RECIPES[case.recipe], **case.fields)
        pelton.quantize(base, config, folder / str(i), fmt=case.fmt)
    return dict(zip(cases, vllm_reads(folder, [folder / str(i) for i in range(len(cases))]), strict=True))


def vllm_reads(folder: Path, checkpoints: list[Path]) -> list[Read]:
    stub, source, out = folder / "libcuda.so.1", folder / "stub.c", folder / "read"
    source.write_text("int nothing;\n")
    soname = f"-Wl,-soname,{stub.name}"
    subprocess.run(["cc", "-shared", "-fPIC", soname, "-o", str(stub), str(source)], check=True)
    out.mkdir()
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-m", "tests.checkpoint.vllm_reader", stub, out, *checkpoints]
    done = subprocess.run(command, cwd=root, env={**os.environ, "PYTHONPATH": root}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    found = []
    for path in checkpoints:
        with safe_open(out / f"{path.name}.safetensors", "np") as file:
            values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            facts = json.loads(file.metadata()["facts"])
        found.append(Read(open_checkpoint(path), facts, values))
    return found


def sources(name: str) -> list[str]:
    """The stored names of what vLLM stacks under ``name``."""
    own = next((own for own in STACKED if f".{own}." in name), None)
    return [name.replace(own, part) for part in STACKED[own]] if own else [name]


@pytest.mark.parametrize("case", CASES)
def test_vllm_loads_every_tensor(case: str, read: dict[str, Read]) -> None:
    checkpoint, facts, values = read[case]
    assert facts.get("error") is None
    assert facts["schemes"] == sorted(CASES[case].schemes)
    # Placeholders of caches whose scales no checkpoint has to have; names that vLLM does not know are errors.
    assert [n for n in facts["missing"] if not n.endswith(("_scale", "_zero_point"))] == []
    weights = [n for n in values if n.endswith(".weight")]
    assert {part for n in weights for part in sources(n)} == set(checkpoint.tensors)


@pytest.mark.parametrize("case", [name for name in CASES if name != "int3"])
def test_vllm_has_the_values_that_were_written(case: str, read: dict[str, Read]) -> None:
    checkpoint, _, values = read[case]
    for name, found in values.items():
        if not name.endswith(".weight"):
            continue
        stored = [checkpoint.read(part) for part in sources(name)]
        want = np.concatenate([dequantize(tensor) for tensor in stored])
        dense = all(tensor.dense for tensor in stored)
        if name.startswith(("lm_head", "model.embed_tokens")):
            found = found[: len(want)]  # vLLM pads vocabularies
        rtol = HALF if dense else CASES[case].rtol  # dense ones are float32 in the folder
        np.testing.assert_allclose(found, want, rtol=rtol, atol=2**-24 if dense else 0, err_msg=name)


@pytest.mark.parametrize("case", ["fp8-static", "smoothquant-static"])
def test_vllm_has_the_static_scales_of_inputs(case: str, read: dict[str, Read]) -> None:
    checkpoint, _, values = read[case]
    scales = {name: found for name, found in values.items() if name.endswith("input_scale")}
    assert len(scales) == 8
    for name, found in scales.items():
        for part in sources(name.replace("input_scale", "weight")):
            quant = checkpoint.activation_quant(part)
            assert quant is not None and (found == np.float32(quant.scale)).all(), part


def test_vllm_has_the_scales_of_caches(read: dict[str, Read]) -> None:
    checkpoint, _, values = read["fp8-kv"]
    quant = checkpoint.kv_quant()
    assert quant is not None
    for kind, scales in (("k", quant.k_scales), ("v", quant.v_scales)):
        for layer, (scale,) in enumerate(scales):
            assert values[f"model.layers.{layer}.self_attn.attn.{kind}_scale"] == np.float32(scale)


@pytest.mark.parametrize("case", REFUSED)
def test_vllm_says_what_it_does_not_read(case: str, read: dict[str, Read]) -> None:
    assert REFUSED[case][1] in read[case].facts["error"]
