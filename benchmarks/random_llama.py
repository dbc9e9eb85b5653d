"""A checkpoint of Llama-3.1-8B's shape: random weights, dense or quantised, made at the speed of a copy."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from pelton.builder.facts import expected_tensors
from pelton.dtypes import BLOCK_TYPES, is_dense
from pelton.ir.activation_quant import ActivationQuant
from pelton.ir.block_encoder import quantize
from pelton.ir.tensors import HostTensor, f32_to_bf16
from pelton.models.checkpoint import Checkpoint, TensorInfo
from pelton.models.registry import create_model

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
HEAD = "lm_head.weight"
#: Some normed values are larger.
REACH = 4.0
#: A mixture of types, not a type: what llama.cpp's file of this name has.
Q4_K_M = "q4_k_m"
#: Rows that are encoded; a weight repeats them.
_ENCODED_ROWS = 256


def type_in_q4_k_m(name: str, layers: int) -> str:
    """q4_k, but q6_k the head and, in the first and the last eighth of the layers and in each third of the
    others, values and down (``llama_tensor_get_type`` and ``use_more_bits`` of llama.cpp)."""
    if name == HEAD:
        return "q6_k"
    if not name.endswith(("v_proj.weight", "down_proj.weight")):
        return "q4_k"
    layer, eighth = int(name.split(".layers.")[1].split(".")[0]), layers // 8
    more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    return "q6_k" if more else "q4_k"


class RandomLlama(Checkpoint):
    """bfloat16 weights of ``config`` from one random block, repeated; the layers' matrices as ``quant``, the
    head as ``head``. ``Q4_K_M`` says itself which type head, embedding and the others have. ``static``:
    inputs of the layers' products are to be fp8 with a static scale, which no text has measured: values up
    to ``REACH``."""

    def __init__(
        self, config: dict[str, Any], quant: str = "bfloat16", head: str = "bfloat16", *, static: bool = False
    ) -> None:
        self._input = ActivationQuant("fp8", "tensor", scale=REACH / 448) if static else None
        self.name, self.path, self.config = "llama-8b-shape", Path("llama-8b-shape"), config
        self.generation_config: dict[str, Any] = {}
        model = create_model(config, max_seq_len=config["max_position_embeddings"])
        self.tensors = {}
        for name, shape in expected_tensors(model).items():
            of_layer = len(shape) == 2 and ".layers." in name
            own = quant if of_layer else head if name == HEAD else "bfloat16"
            if quant == Q4_K_M and len(shape) == 2:
                own = type_in_q4_k_m(name, config["num_hidden_layers"])
            nbytes = (
                2 * int(np.prod(shape)) if is_dense(own) else shape[0] * BLOCK_TYPES[own].row_bytes(shape[1])
            )
            self.tensors[name] = TensorInfo(name=name, shape=shape, quant=own, nbytes=nbytes)
        self._values = np.random.default_rng(0).standard_normal(1 << 22, dtype=np.float32) * np.float32(0.02)
        self._block = f32_to_bf16(self._values)
        self._ones = f32_to_bf16(np.ones(1 << 14, np.float32))
        self._encoded: dict[tuple[object, ...], np.ndarray[Any, np.dtype[np.uint8]]] = {}

    def read(self, name: str) -> HostTensor:
        shape, quant = self.tensors[name].shape, self.tensors[name].quant
        if not is_dense(quant):
            if (quant, shape) not in self._encoded:
                values = self._values[: _ENCODED_ROWS * shape[1]].reshape(-1, shape[1])
                rows = quantize(values, quant).data.view(np.uint8)
                self._encoded[quant, shape] = np.resize(rows, (shape[0], rows.shape[1]))
            return HostTensor(quant, shape, self._encoded[quant, shape])
        source = self._ones if len(shape) == 1 else np.roll(self._block, len(name) * 977)
        return HostTensor("bfloat16", shape, np.resize(source, shape))

    def activation_quant(self, name: str) -> ActivationQuant | None:
        return self._input if ".layers." in name and len(self.tensors[name].shape) == 2 else None

    def write_tokenizer(self, directory: Path) -> None:
        (directory / "tokenizer.json").write_text("{}")
        (directory / "special_tokens.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_ids": [2]}))

    def files(self) -> Iterable[Path]:
        return ()
