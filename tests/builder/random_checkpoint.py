"""A checkpoint of random weights in memory, of any shape and value types."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pelton.builder.facts import expected_tensors
from pelton.ir.block_encoder import quantize
from pelton.ir.tensors import HostTensor, f32_to_bf16
from pelton.models.checkpoint import Checkpoint, TensorInfo
from pelton.models.registry import create_model

TINY_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "eos_token_id": [2, 7],
    "bos_token_id": 1,
}


class RandomCheckpoint(Checkpoint):
    """Weights of the model that ``config`` describes; ``quant``: type of each two-dimensional one."""

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        quant: str | Callable[[str], str] = "float32",
        seed: int = 0,
        name: str = "tiny",
    ) -> None:
        self.name = name
        self.path = Path(name)
        self.config = dict(config)
        self.generation_config = {"temperature": 0.5, "top_k": 20, "eos_token_id": [9]}
        self._seed = seed
        limit = self.config.get("max_position_embeddings") or self.config["n_positions"]
        model = create_model(self.config, max_seq_len=limit)
        quant_of = quant if callable(quant) else lambda _: quant
        self.tensors = {
            tensor: TensorInfo(
                name=tensor, shape=shape, quant=quant_of(tensor) if len(shape) > 1 else "float32", nbytes=0
            )
            for tensor, shape in expected_tensors(model).items()
        }
        self.damage: dict[str, float] = {}
        """Value to put into the first element of a tensor."""

    def read(self, name: str) -> HostTensor:
        info = self.tensors[name]
        rng = np.random.default_rng([self._seed, *name.encode()])
        values = rng.standard_normal(info.shape, dtype=np.float32)
        if len(info.shape) > 1:
            values *= np.float32(info.shape[-1] ** -0.5)
        else:
            values = 1 + np.float32(0.1) * values
        if name in self.damage:
            values.reshape(-1)[0] = self.damage[name]
        if info.quant == "float32":
            return HostTensor("float32", info.shape, values)
        if info.quant == "float16":
            return HostTensor("float16", info.shape, values.astype(np.float16))
        if info.quant == "bfloat16":
            return HostTensor("bfloat16", info.shape, f32_to_bf16(values))
        return quantize(values, info.quant)

    def write_tokenizer(self, directory: Path) -> None:
        (directory / "tokenizer.json").write_text("{}")
        (directory / "special_tokens.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_ids": [2]}))

    def files(self) -> Iterable[Path]:
        return ()
