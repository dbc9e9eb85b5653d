"""Tiny checkpoints of every architecture: Hugging Face folders and GGUF files of the same weights.

The GGUF writer does what llama.cpp's converter does, through the gguf library's own name table, so
that our reader is tested against something it does not share code with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
import transformers

from pelton.ir.block_encoder import quantize

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
#: Byte-level tokens, a few merges, three special tokens, padded.
VOCAB_SIZE = 288

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": VOCAB_SIZE - 3,
    "eos_token_id": VOCAB_SIZE - 1,
    "pad_token_id": None,
}

#: architecture -> (transformers config class, its fields, GGUF architecture)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaConfig", {**_COMMON, "rms_norm_eps": 1e-5}, "llama"),
    "mistral": ("MistralConfig", {**_COMMON, "sliding_window": 16}, "llama"),
    "qwen2": ("Qwen2Config", {**_COMMON, "tie_word_embeddings": True}, "qwen2"),
    "qwen3": ("Qwen3Config", {**_COMMON, "head_dim": 32, "tie_word_embeddings": True}, "qwen3"),
    "gemma": ("GemmaConfig", {**_COMMON, "head_dim": 32}, "gemma"),
    "gemma2": (
        "Gemma2Config",
        {**_COMMON, "head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32},
        "gemma2",
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **_COMMON,
            "head_dim": 32,
            "num_hidden_layers": 7,
            "sliding_window": 16,
            "query_pre_attn_scalar": 32,
        },
        "gemma3",
    ),
    "phi3": ("Phi3Config", {**_COMMON, "sliding_window": 16}, "phi3"),
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": VOCAB_SIZE,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 128,
            "initializer_range": 0.2,
            "bos_token_id": VOCAB_SIZE - 3,
            "eos_token_id": VOCAB_SIZE - 3,
        },
        "gpt2",
    ),
}


def tiny_model(arch: str, seed: int = 0, **fields: Any) -> Any:
    """A random float32 transformers model; ``fields`` override its config's."""
    class_name, values, _ = ARCHITECTURES[arch]
    config = getattr(transformers, class_name)(**{**values, **fields})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # not all ones and zeros
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def tiny_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE of ``VOCAB_SIZE`` tokens: lossless, with the special tokens last."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("o", "r"), ("l", "d")]
    tokens = alphabet + [left + right for left, right in merges]
    tokens += [f"[PAD{i}]" for i in range(VOCAB_SIZE - len(SPECIAL) - len(tokens))]
    vocab = {token: index for index, token in enumerate([*tokens, *SPECIAL])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return tokenizer


def write_tokenizer(folder: Path, **config: Any) -> None:
    """``tokenizer.json`` and ``tokenizer_config.json`` with a chat template."""
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[2],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({**values, **config}))


def tiny_hf_checkpoint(
    arch: str,
    tmp_path: Path,
    *,
    dtype: str = "float32",
    max_shard_size: str = "1GB",
    model: Any = None,
    **fields: Any,
) -> Path:
    """A Hugging Face folder ``tmp_path/arch`` with random weights and a tokenizer."""
    folder = tmp_path / arch
    model = tiny_model(arch, **fields) if model is None else model
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    model.float()
    write_tokenizer(folder)
    return folder


def tiny_gguf(
    arch: str,
    tmp_path: Path,
    *,
    quant: str = "F32",
    model: Any = None,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    **fields: Any,
) -> Path:
    """A GGUF file ``tmp_path/arch.gguf`` as llama.cpp's converter would write it.

    Matrices are encoded as ggml type ``quant``; ``metadata`` adds or replaces entries (None removes
    one), ``tensors`` adds float32 tensors under GGUF names.
    """
    model = tiny_model(arch, **fields) if model is None else model
    gguf_arch = ARCHITECTURES[arch][2]
    path = tmp_path / f"{arch}.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, gguf_arch)
    entries = {**_model_metadata(model.config, gguf_arch), **_tokenizer_metadata(), **(metadata or {})}
    for key, value in entries.items():
        _add(writer, key, value)
    for name, values, can_quantise in _stored_tensors(model, gguf_arch):
        kind = gguf.GGMLQuantizationType[quant]
        if quant == "F32" or not can_quantise:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, _encode(values, kind), raw_dtype=kind)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _encode(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """``values`` in ggml type ``kind``; the gguf library has no encoder for K types, so ours then."""
    try:
        return gguf.quantize(values, kind)
    except NotImplementedError:
        return quantize(values, kind.name.lower()).data


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def _model_metadata(config: Any, arch: str) -> dict[str, Any]:
    if arch == "gpt2":
        values: dict[str, Any] = {
            "block_count": config.n_layer,
            "context_length": config.n_positions,
            "embedding_length": config.n_embd,
            "feed_forward_length": 4 * config.n_embd,
            "attention.head_count": config.n_head,
            "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        }
        return {f"{arch}.{key}": value for key, value in values.items()}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
    }
    if arch in ("gemma2", "gemma3", "phi3"):
        values["attention.sliding_window"] = config.sliding_window
    if arch == "gemma2":
        values["attn_logit_softcapping"] = config.attn_logit_softcapping
        values["final_logit_softcapping"] = config.final_logit_softcapping
    if arch == "llama":
        values["rope.dimension_count"] = head_dim
    return {f"{arch}.{key}": value for key, value in values.items()}


def _tokenizer_metadata() -> dict[str, Any]:
    tokenizer = tiny_tokenizer()
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "general.name": "Tiny",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            3 if t in SPECIAL else 5 if t.startswith("[PAD") else 1 for t in tokens
        ],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": vocab[SPECIAL[0]],
        "tokenizer.ggml.eos_token_id": vocab[SPECIAL[2]],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _stored_tensors(model: Any, arch: str) -> list[tuple[str, np.ndarray, bool]]:
    """(GGUF name, float32 values as stored, may be quantised) of every weight."""
    layers = getattr(model.config, "num_hidden_layers", None)
    kind = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch)
    names = gguf.get_tensor_name_map(kind, layers)
    stored = []
    for hf_name, tensor in model.state_dict().items():
        if hf_name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise AssertionError(f"the gguf library has no name for {hf_name}")
        values = tensor.float().numpy()
        if arch == "llama" and ".q_proj." in hf_name:
            values = _interleave(values, model.config.num_attention_heads)
        if arch == "llama" and ".k_proj." in hf_name:
            values = _interleave(values, model.config.num_key_value_heads)
        if arch.startswith("gemma") and "norm.weight" in hf_name:
            values = values + np.float32(1)
        if arch == "gpt2" and any(part in hf_name for part in ("c_attn.w", "c_proj.w", "c_fc.w")):
            values = np.ascontiguousarray(values.T)
        stored.append((name, values, values.ndim == 2))
    return stored


def _interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's row order for RoPE on neighbouring pairs."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
