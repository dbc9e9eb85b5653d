"""Checkpoints that others quantised: their layouts read as block types. A file for each format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pelton.errors import CheckpointError
from pelton.models.checkpoint.json_file import read_json
from pelton.models.checkpoint.quantized.auto_round import auto_round_weights
from pelton.models.checkpoint.quantized.awq import awq_weights
from pelton.models.checkpoint.quantized.bitsandbytes import bitsandbytes_weights
from pelton.models.checkpoint.quantized.compressed_tensors import compressed_weights
from pelton.models.checkpoint.quantized.fp8 import fbgemm_weights, fp8_weights
from pelton.models.checkpoint.quantized.gptq import gptq_weights
from pelton.models.checkpoint.quantized.modelopt import modelopt_weights
from pelton.models.checkpoint.quantized.settings import Settings
from pelton.models.checkpoint.quantized.stored import StoredTensors
from pelton.models.checkpoint.quantized.weight import QuantizedWeight

METHODS: Mapping[str, Callable[[Settings, StoredTensors], Iterator[QuantizedWeight]]] = {
    "gptq": gptq_weights,
    "awq": awq_weights,
    "compressed-tensors": compressed_weights,
    "auto-round": auto_round_weights,
    "fp8": fp8_weights,
    "fbgemm_fp8": fbgemm_weights,
    "modelopt": modelopt_weights,
    "modelopt_fp4": modelopt_weights,
    "bitsandbytes": bitsandbytes_weights,
}
#: Files beside config.json in which a quantiser's older versions, or ModelOpt, keep the settings.
_OTHER_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}


def quantization_config(folder: Path, config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """Where the folder says how it is quantised, and that; None where it is not.

    Raises ``CheckpointError`` for what is no such config.
    """
    where, found = folder / "config.json", config.get("quantization_config") or None
    if found is None:
        where = next((folder / name for name in _OTHER_FILES if (folder / name).exists()), where)
        if where.name in _OTHER_FILES:
            found = {"quant_method": _OTHER_FILES[where.name], **read_json(where)}
    if found is None:
        return None
    if not isinstance(found, dict):
        raise CheckpointError(f"{where}: quantization_config is not an object")
    return f"{where}: quantization_config", found


def quantized_weights(
    where: str, values: Mapping[str, Any], stored: StoredTensors
) -> dict[str, QuantizedWeight]:
    """Every quantised weight by its Hugging Face name.

    Raises ``CheckpointError`` for a method that is not supported, and for tensors that do not fit it.
    """
    settings = Settings(where, values)
    method = str(settings.get("quant_method") or "?").lower()
    if method not in METHODS:
        raise CheckpointError(
            f"{stored.where} is quantised with {method}, which Pelton does not read (it reads "
            f"{', '.join(m for m in METHODS if m != 'modelopt_fp4')} and GGUF files); use the unquantised "
            "checkpoint"
        )
    return {weight.name: weight for weight in METHODS[method](settings, stored)}
