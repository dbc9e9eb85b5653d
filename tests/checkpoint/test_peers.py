"""The field's own tools as oracles, where they are installed: they read what is written, and the other way.

Skipped without ``compressed-tensors``, ``bitsandbytes`` with ``accelerate``, ``gptqmodel`` with ``optimum``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.blocks import dequantize
from pelton.ir.group_encoder import encode
from pelton.ir.tensors import HostTensor
from pelton.models.checkpoint import open_checkpoint
from pelton.models.checkpoint.write import write_checkpoint
from pelton.quant.config import QuantConfig
from tests.checkpoint.makers import tiny_hf_checkpoint
from tests.checkpoint.packers import SIZES, Packed, assert_same_weights, quantized_checkpoint

UP = "model.layers.0.mlp.up_proj.weight"


def written(
    tmp_path: Path,
    quant: str,
    fmt: str,
    *,
    symmetric: bool = True,
    activations: ActivationQuant | None = None,
) -> tuple[Path, dict[str, HostTensor], Any]:
    """A checkpoint in format ``fmt``, its quantised tensors, and a model with their values."""
    base = open_checkpoint(tiny_hf_checkpoint("llama", tmp_path, **SIZES))
    names = [name for name in base.tensors if name.endswith("_proj.weight")]
    tensors = {n: encode(dequantize(base.read(n)), quant, symmetric=symmetric) for n in names}
    config = QuantConfig(symmetric=symmetric, activations=activations)
    write_checkpoint(tmp_path / "out", base, iter(tensors.items()), config, fmt)
    model = load(base.path)
    for name, tensor in tensors.items():
        model.state_dict()[name].copy_(torch.from_numpy(dequantize(tensor)))
    return tmp_path / "out", tensors, model


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def relative_error(a: Any, b: Any) -> float:
    ids = torch.arange(20)[None]
    with torch.no_grad():
        want = b(ids).logits
        return float((a(ids).logits - want).abs().max() / want.abs().max())


#: Asymmetric ones are left out: transformers makes their zero points unpacked before it loads them.
@pytest.mark.parametrize("quant", ["int4_g32", "int3_g64", "int8_g128", "int8_row", "fp8_row", "fp8_g128"])
def test_transformers_computes_with_what_is_written(quant: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    folder, _, model = written(tmp_path, quant, "compressed-tensors")
    assert relative_error(load(folder), model) < 1e-6


@pytest.mark.parametrize(
    ("quant", "symmetric", "activations"),
    [
        ("int4_g32", False, None),
        ("int4_g128", False, None),
        ("int8_g64", False, None),
        ("int8_row", True, ActivationQuant("int8")),
        ("fp8_row", True, ActivationQuant("fp8")),
        ("fp8_row", True, ActivationQuant("fp8", per="tensor", scale=0.5)),
        ("nvfp4", True, None),
        ("mxfp4", True, None),
    ],
)
def test_compressed_tensors_decompresses_what_is_written(
    quant: str, symmetric: bool, activations: ActivationQuant | None, tmp_path: Path
) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors import BaseCompressor
    from safetensors.torch import load_file

    folder, tensors, _ = written(
        tmp_path, quant, "compressed-tensors", symmetric=symmetric, activations=activations
    )
    config = transformers.AutoConfig.from_pretrained(folder).quantization_config
    (group,) = config["config_groups"].values()
    scheme = quantization.QuantizationScheme(**group)
    module = UP.removesuffix("weight")
    stored = load_file(folder / "model.safetensors")
    local = {name.removeprefix(module): value for name, value in stored.items() if name.startswith(module)}
    compressor = BaseCompressor.get_value_from_registry(group["format"])
    found = compressor.decompress(local, scheme)["weight"].float().numpy()
    # NVFP4 and MXFP4 are decompressed to bfloat16.
    rtol = 2**-8 if quant.endswith("fp4") else 1e-3 if quant.startswith("int4") else 1e-6
    np.testing.assert_allclose(found, dequantize(tensors[UP]), rtol=rtol, atol=1e-6)


@pytest.mark.parametrize(
    "preset", ["W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP4A16"]
)
def test_what_compressed_tensors_compresses_is_read(preset: str, tmp_path: Path) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = quantization.preset_name_to_scheme(preset, ["Linear"])
    args = scheme.weights
    form = "float-quantized" if args.type == "float" else "int-quantized"
    form = "mxfp4-pack-quantized" if preset.startswith("MXFP4") else form
    form = "pack-quantized" if args.type == "int" and "16" in preset else form
    compressor = BaseCompressor.get_value_from_registry(form)

    def pack(weight: torch.Tensor, name: str) -> Packed:
        low, high = ranges(weight, args)
        scale, zero = calculate_qparams(low, high, args)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        tensors = compressor.compress(state, scheme)
        values = compressor.decompress(dict(tensors), scheme)["weight"]
        if scheme.input_activations is not None and scheme.input_activations.dynamic is False:
            tensors["input_scale"] = torch.tensor([0.5])
        return Packed(tensors, values.float())

    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": scheme.model_dump()},
        "ignore": ["lm_head"],
    }
    config["config_groups"]["group_0"]["format"] = form  # type: ignore[index]
    model = quantized_checkpoint(tmp_path / "m", config, pack)
    checkpoint = open_checkpoint(tmp_path / "m")
    # Scales are float32 here and float16 in 4-bit blocks.
    assert_same_weights(checkpoint, model, atol=1e-3 if preset.startswith(("W4", "MX")) else 1e-6)


def ranges(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest value of what shares a scale."""
    rows, cols = weight.shape
    strategy = str(args.strategy)
    if strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if strategy == "block":
        height, width = args.block_structure
        blocks = weight.unflatten(0, (-1, min(height, rows))).unflatten(2, (-1, width))
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    grouped = weight.reshape(rows, -1, args.group_size or cols)
    return grouped.amin(-1), grouped.amax(-1)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_what_bitsandbytes_quantises_is_read(kind: str, nested: bool, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")

    def pack(weight: torch.Tensor, name: str) -> Packed:
        codes, state = functional.quantize_4bit(
            weight, blocksize=64, compress_statistics=nested, quant_type=kind
        )
        tensors = {f"weight.{k}": v for k, v in state.as_dict(packed=True).items()}
        return Packed({"weight": codes, **tensors}, functional.dequantize_4bit(codes, state))

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    model = quantized_checkpoint(tmp_path / "m", config, pack)
    assert_same_weights(open_checkpoint(tmp_path / "m"), model, atol=1e-6)


def test_bitsandbytes_reads_what_is_written(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    pytest.importorskip("accelerate")
    folder, tensors, _ = written(tmp_path, "nf4_g64", "bitsandbytes")
    weight = load(folder).model.layers[0].mlp.up_proj.weight
    found = functional.dequantize_4bit(weight.data, weight.quant_state).numpy()
    np.testing.assert_array_equal(found, dequantize(tensors[UP]))


@pytest.mark.parametrize(
    ("quant", "symmetric"), [("int4_g32", True), ("int4_g32", False), ("int8_g64", True)]
)
def test_gptqmodel_reads_what_is_written(quant: str, symmetric: bool, tmp_path: Path) -> None:
    pytest.importorskip("gptqmodel")
    pytest.importorskip("optimum")
    folder, tensors, model = written(tmp_path, quant, "gptq", symmetric=symmetric)
    # The kernel that it takes on CPUs by itself rounds inputs to bfloat16 (gptqmodel 7.6: logits 2 % off).
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["backend"] = "torch"
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load(folder)
    found = loaded.model.layers[0].mlp.up_proj.dequantize_weight().float().T.numpy()
    np.testing.assert_allclose(found, dequantize(tensors[UP]), atol=1e-3)  # float16
    assert relative_error(loaded, model) < 1e-2


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_what_gptqmodel_packs_is_read(bits: int, tmp_path: Path) -> None:
    pytest.importorskip("gptqmodel")
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    from tests.checkpoint import packers

    def pack(weight: torch.Tensor, name: str) -> Packed:
        rows, cols = weight.shape
        index = torch.arange(cols) // 32
        _, scale, zero, values = packers.groups(weight, bits, 32, sym=False)
        linear = torch.nn.Linear(cols, rows, bias=False)
        linear.weight.data = values
        size = {"in_features": cols, "out_features": rows}
        packed = TorchLinear(bits=bits, group_size=32, sym=False, desc_act=False, bias=False, **size)
        packed.pack_original(linear, scale, zero, index.int())
        names = ("qweight", "qzeros", "scales", "g_idx")
        return Packed({n: getattr(packed, n).detach().clone() for n in names}, values)

    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": "gptq_v2"}
    model = quantized_checkpoint(tmp_path / "m", config, pack, num_hidden_layers=1)
    assert_same_weights(open_checkpoint(tmp_path / "m"), model)
