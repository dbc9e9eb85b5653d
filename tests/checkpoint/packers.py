"""Writes quantised checkpoints as their formats' papers and reference code lay them out, naively.

Nothing here is shared with the readers: bits are put together as Python integers, values as torch tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from pelton.ir.blocks import dequantize
from pelton.ir.evaluate import evaluate
from pelton.models.checkpoint import Checkpoint, check_tensors
from tests.checkpoint.makers import ARCHITECTURES, tiny_model, write_tokenizer

Tensors = dict[str, torch.Tensor]

#: Rows and columns are whole groups of 128.
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@dataclass
class Packed:
    """A linear layer's tensors by the names after its module's, and the values they stand for."""

    tensors: Tensors
    values: torch.Tensor
    extra: dict[str, Any] = field(default_factory=dict)


def quantized_checkpoint(
    folder: Path,
    config: dict[str, Any] | None,
    pack: Callable[[torch.Tensor, str], Packed],
    *,
    arch: str = "llama",
    skip: Iterable[str] = ("lm_head",),
    others: Tensors | None = None,
    dtype: str = "float32",
    **fields: Any,
) -> Any:
    """Write a random model, its linear layers but ``skip`` packed; returns the model with their values."""
    sizes = {} if arch == "gpt2" else SIZES
    model = tiny_model(arch, **{**sizes, **fields})
    tensors: Tensors = dict(model.to(getattr(torch, dtype)).state_dict())
    model.float()
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    for name, module in model.named_modules():
        conv = type(module).__name__ == "Conv1D"
        if not (conv or isinstance(module, torch.nn.Linear)) or name in tuple(skip):
            continue
        weight = module.weight.detach().T.contiguous() if conv else module.weight.detach()
        packed = pack(weight, name)
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in packed.tensors.items()}
        module.weight.data = packed.values.T.contiguous() if conv else packed.values
    folder.mkdir(parents=True, exist_ok=True)
    save_file({**{k: v.clone() for k, v in tensors.items()}, **(others or {})}, folder / "model.safetensors")
    written = json.loads(model.config.to_json_string())
    written["architectures"] = [type(model).__name__]
    if config is not None:
        written["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(written))
    write_tokenizer(folder)
    assert arch in ARCHITECTURES
    return model


def assert_same_weights(checkpoint: Checkpoint, model: Any, atol: float = 0.0) -> None:
    """Every tensor of the Hugging Face model is there with the model's values, and no other."""
    expected = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert check_tensors(expected, checkpoint) == []
    for name in expected:
        found = dequantize(evaluate(checkpoint.source(name), checkpoint.read))
        np.testing.assert_allclose(found, model.state_dict()[name].numpy(), rtol=0, atol=atol, err_msg=name)


def words(codes: torch.Tensor, bits: int, dtype: str = "int32") -> torch.Tensor:
    """(rows, n) codes -> (rows, words): each row one long number, the first code lowest."""
    size = {"int32": 4, "int16": 2}[dtype]
    rows = []
    for row in codes.tolist():
        number = sum(code << (bits * i) for i, code in enumerate(row))
        length = -(-len(row) * bits // (8 * size)) * size
        rows.append(list(number.to_bytes(length, "little")))
    return torch.tensor(rows, dtype=torch.uint8).view(getattr(torch, dtype))


def groups(
    weight: torch.Tensor,
    bits: int,
    group: int,
    *,
    sym: bool,
    order: torch.Tensor | None = None,
    scale_dtype: torch.dtype = torch.float16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (N, K), scales and zero points (N, G), and values; ``order``: the group of each column."""
    n, k = weight.shape
    group = k if group == -1 else group
    index = torch.arange(k) // group if order is None else order
    count = int(index.max()) + 1
    scale, zero = torch.empty(n, count), torch.empty(n, count)
    for g in range(count):
        part = weight[:, index == g]
        if sym:
            scale[:, g] = part.abs().amax(1) / (2 ** (bits - 1) - 0.5)
            zero[:, g] = 2 ** (bits - 1)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale[:, g] = (high - low) / (2**bits - 1)
            zero[:, g] = (-low / scale[:, g]).round()
    scale = scale.to(scale_dtype).float()
    codes = (weight / scale[:, index] + zero[:, index]).round().clamp(0, 2**bits - 1)
    values = scale[:, index] * (codes - zero[:, index])
    return codes.int(), scale, zero.int(), values


def gptq(
    weight: torch.Tensor,
    *,
    bits: int = 4,
    group: int = 128,
    sym: bool = True,
    version: str = "gptq",
    order: torch.Tensor | None = None,
    scale_dtype: torch.dtype = torch.float16,
) -> Packed:
    codes, scale, zero, values = groups(weight, bits, group, sym=sym, order=order, scale_dtype=scale_dtype)
    k = weight.shape[1]
    if version == "gptq" and bits != 3:
        ones = sum(1 << i for i in range(0, 32, bits))
        packed_zero = words(zero.T, bits) - torch.tensor(ones, dtype=torch.int64).to(torch.int32)
    else:
        packed_zero = words((zero.T - 1) % 8 if version == "gptq" else zero.T, bits)
    size = k if group == -1 else group
    index = torch.arange(k) // size if order is None else order
    return Packed(
        {
            "qweight": words(codes, bits).T,
            "qzeros": packed_zero,
            "scales": scale.T.to(scale_dtype),
            "g_idx": index.int(),
        },
        values,
    )


def act_order(k: int, group: int, seed: int = 0) -> torch.Tensor:
    """The group of each column when columns were quantised in a random order."""
    order = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
    index = torch.empty(k, dtype=torch.int64)
    index[order] = torch.arange(k) // group
    return index


def awq(weight: torch.Tensor, *, group: int = 128, version: str = "gemm") -> Packed:
    codes, scale, zero, values = groups(weight, 4, group, sym=False)
    n, k = weight.shape
    group = k if group == -1 else group
    if version == "gemm":

        def outputs(x: torch.Tensor) -> torch.Tensor:  # (N, m) -> (m, N / 8)
            eights = x.T.reshape(x.shape[1], n // 8, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
            return words(eights.reshape(x.shape[1], n), 4)

        return Packed({"qweight": outputs(codes), "qzeros": outputs(zero), "scales": scale.T.half()}, values)
    count = k // group
    width = -(-count // 8)
    multiple = {64: 2, 32: 4}.get(group, 1)
    width = -(-width // multiple) * multiple
    padded_scale = torch.zeros(n, width * 8)
    padded_scale[:, :count] = scale
    padded_zero = torch.zeros(n, width * 8, dtype=torch.int32)
    padded_zero[:, :count] = zero
    if version == "gemv":
        return Packed(
            {"qweight": words(codes, 4), "qzeros": words(padded_zero, 4), "scales": padded_scale.half()},
            values,
        )
    fast = torch.zeros(n // 4, k // 64, 4, 64, dtype=torch.int32)
    for row in range(n):
        for col in range(k):
            a, b, i = col % 32 // 8, col % 8 // 2, col % 2
            place = b * 8 + a * 2 + i  # (b, a, i)
            eight, j = divmod(place, 8)
            place = eight * 8 + (j % 2) * 4 + j // 2
            fast[row // 4, col // 64, row % 4, col // 32 % 2 * 32 + place] = codes[row, col]
    return Packed(
        {
            "qweight": words(fast.reshape(n // 4, -1), 4, "int16"),
            "scales": padded_scale.T.half(),
            "qzeros": -(padded_scale * padded_zero).T.half(),
        },
        values,
    )


def fp8(weight: torch.Tensor, *, block: tuple[int, int] | None = None, row: bool = False) -> Packed:
    """e4m3 codes with one scale, one a ``row`` or one a ``block``."""
    n, k = weight.shape
    height, width = block or ((1, k) if row else (n, k))
    down, across = -(-n // height), -(-k // width)
    scale = torch.empty(down, across)
    for i in range(down):
        for j in range(across):
            part = weight[i * height : (i + 1) * height, j * width : (j + 1) * width]
            scale[i, j] = part.abs().max() / 448
    full = scale.repeat_interleave(height, 0)[:n].repeat_interleave(width, 1)[:, :k]
    codes = (weight / full).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Packed({"weight": codes, "scale": scale}, codes.float() * full)


#: E2M1's magnitudes, by the lower three bits of a code.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def fp4(weight: torch.Tensor, group: int = 16) -> tuple[torch.Tensor, torch.Tensor, float, torch.Tensor]:
    """Codes (N, K / 2), scales of groups and of the tensor, values: NVFP4."""
    tensor = float(weight.abs().max() / (6 * 448))
    grouped = weight.reshape(len(weight), -1, group)
    scale = (grouped.abs().amax(-1) / 6 / tensor).to(torch.float8_e4m3fn)
    full = scale.float()[..., None] * tensor
    magnitude = ((grouped / full).abs()[..., None] - E2M1).abs().argmin(-1)
    codes = (magnitude + 8 * (grouped < 0)).reshape(weight.shape)
    values = (E2M1[magnitude] * grouped.sign() * full).reshape(weight.shape)
    return (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8), scale, tensor, values
