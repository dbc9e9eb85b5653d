"""Writes quantised checkpoints in the formats that transformers and vLLM load. A file for each format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from pelton.dtypes import GROUP_SIZES
from pelton.errors import ConfigError
from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.blocks import dequantize
from pelton.ir.evaluate import evaluate
from pelton.ir.tensors import HostTensor
from pelton.models.checkpoint.base import Checkpoint, is_order
from pelton.models.checkpoint.write.bitsandbytes import BitsAndBytes
from pelton.models.checkpoint.write.compressed_tensors import CompressedTensors
from pelton.models.checkpoint.write.folder import checkpoint_folder, write_metadata
from pelton.models.checkpoint.write.gptq import GPTQ
from pelton.models.checkpoint.write.packing import dense_part
from pelton.models.checkpoint.write.shards import MAX_SHARD, Part, SafetensorsWriter
from pelton.quant.config import QuantConfig

FORMATS = ("compressed-tensors", "gptq", "bitsandbytes")


class Format(Protocol):
    """Packs weights one by one, and then says how in a ``quantization_config``."""

    name: str

    def check(
        self, module: str, quant: str, shape: tuple[int, ...], activation: ActivationQuant | None
    ) -> None:
        """Raise ``ConfigError`` where ``pack`` would for such a weight."""
        ...

    def pack(self, module: str, tensor: HostTensor, activation: ActivationQuant | None) -> dict[str, Part]:
        """The stored tensors of a block-quantised weight, by the names after the module's."""
        ...

    def config(self, dense: Iterable[str]) -> dict[str, Any]:
        """The ``quantization_config`` of all that was packed, and of the ``dense`` linear layers."""
        ...


def write_checkpoint(
    out: Path,
    base: Checkpoint,
    tensors: Iterable[tuple[str, HostTensor]],
    config: QuantConfig,
    fmt: str = "compressed-tensors",
    *,
    activation_of: Callable[[str], ActivationQuant | None] | None = None,
    kv_scales: Mapping[str, float] = MappingProxyType({}),
    max_shard: int = MAX_SHARD,
) -> None:
    """Write a Hugging Face folder ``out`` of ``base`` with ``tensors`` in place of its own.

    ``tensors``: Hugging Face names and values, dense or of block types (matrices of linear layers), taken one
    at a time and in any order; what they leave out comes from ``base``, blocks of GGUF files as float32.
    ``activation_of`` the weight's name, asked when it is written: how its input is quantised
    (``config.activations`` where it is left out). ``kv_scales``: tensors to add for caches of ``config.kv``.
    ``fmt``: one of ``FORMATS``.

    ``out`` is there when everything is, or not at all. Raises ``ConfigError`` for types that the format does
    not have, ``CheckpointError`` when something is at ``out`` or it cannot be written.
    """
    dtype = _dtype(base)
    form = _format(fmt, config, base, dtype)
    activation_of = activation_of or (lambda name: config.activations)
    dense: list[str] = []
    with checkpoint_folder(out) as folder:
        with SafetensorsWriter(folder, max_shard) as writer:
            written: set[str] = set()
            for name, tensor in tensors:
                written.add(name)
                module, _, kind = name.rpartition(".")
                if tensor.dense:
                    writer.write(name, dense_part(tensor))
                    if kind == "weight" and len(tensor.shape) == 2:
                        dense.append(module)
                    continue
                assert kind == "weight", f"{name} is no weight of a linear layer"
                for part, stored in form.pack(module, tensor, activation_of(name)).items():
                    writer.write(f"{module}.{part}", stored)
            for name in base.tensors:
                if name not in written and not is_order(base.tensors[name]):
                    kept = evaluate(base.source(name), base.read)
                    if not kept.dense:
                        kept = HostTensor("float32", kept.shape, dequantize(kept))
                    writer.write(name, dense_part(kept))
                    if name.endswith(".weight") and len(kept.shape) == 2:
                        dense.append(name.removesuffix(".weight"))
            for name, scale in kv_scales.items():
                writer.write(name, Part("F32", np.array([scale], np.float32)))
        if "lm_head.weight" not in written | set(base.tensors):
            dense.append("lm_head")  # tied to the embeddings
        write_metadata(folder, base, form.config([m for m in dense if "embed" not in m]), dtype)


def check_weights(
    base: Checkpoint,
    weights: Iterable[tuple[str, str, tuple[int, ...], ActivationQuant | None]],
    config: QuantConfig,
    fmt: str,
) -> None:
    """Raise ``ConfigError`` for weights that ``write_checkpoint`` would refuse: module, type, shape (out, in)
    and how the input is quantised, of each. No values are needed."""
    form = _format(fmt, config, base, _dtype(base))
    for module, quant, shape, activation in weights:
        form.check(module, quant, shape, activation)


def _format(fmt: str, config: QuantConfig, base: Checkpoint, dtype: str) -> Format:
    if fmt == "compressed-tensors":
        return CompressedTensors(config.kv)
    if fmt == "gptq":
        widths = [info.shape[1] for info in base.tensors.values() if len(info.shape) == 2]
        fits = (size for size in reversed(GROUP_SIZES) if all(width % size == 0 for width in widths))
        return GPTQ(sym=config.symmetric, largest_group=next(fits, GROUP_SIZES[0]))
    if fmt == "bitsandbytes":
        return BitsAndBytes(dtype)
    raise ConfigError(f"unknown checkpoint format {fmt!r} (known: {', '.join(FORMATS)})")


def _dtype(base: Checkpoint) -> str:
    """In which transformers is to load the dense weights: the type of most of them."""
    counts: dict[str, int] = {}
    for info in base.tensors.values():
        if info.quant in ("float32", "float16", "bfloat16") and len(info.shape) == 2:
            counts[info.quant] = counts.get(info.quant, 0) + 1
    return max(counts, key=lambda quant: counts[quant], default="float32")
