"""Model metadata: GGUF's keys to a Hugging Face ``config.json`` dict, per architecture.

Values a GGUF file does not carry (activation, attention scale, Gemma's local RoPE base) are the ones
llama.cpp assumes for the architecture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pelton.errors import CheckpointError

Config = dict[str, Any]
_MISSING = object()


class Metadata:
    """Lookups under the architecture's prefix, with errors that name file and key."""

    def __init__(self, path: str, arch: str, values: Mapping[str, Any]) -> None:
        self.path, self.arch, self.values = path, arch, values

    def get(self, key: str, default: Any = _MISSING) -> Any:
        value = self.values.get(f"{self.arch}.{key}", default)
        if value is _MISSING:
            raise CheckpointError(f"{self.path} lacks the metadata {self.arch}.{key}, which its model needs")
        return value

    def number(self, key: str, default: Any = _MISSING) -> int:
        """An integer; a per-layer list must repeat one value."""
        value = self.get(key, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise CheckpointError(
                    f"{self.path} has {self.arch}.{key} varying by layer, which Pelton does not support"
                )
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int):
            raise CheckpointError(f"{self.path} has {self.arch}.{key} = {value!r}, not an integer")
        return value

    def real(self, key: str, default: Any = _MISSING) -> Any:
        """A number that is not negative, or the default."""
        value = self.get(key, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise CheckpointError(f"{self.path} has {self.arch}.{key} = {value!r}, not a positive number")
        return value

    def count(self, key: str, default: Any = _MISSING) -> int:
        """A positive integer."""
        value = self.number(key, default)
        if value < 1:
            raise CheckpointError(f"{self.path} has {self.arch}.{key} = {value}, which must be positive")
        return value


def config_from_metadata(
    meta: Metadata, tensors: Mapping[str, tuple[int, ...]], factors: Mapping[str, npt.NDArray[np.float32]]
) -> Config:
    """The config dict of a GGUF file.

    ``tensors``: GGUF names -> shapes; ``factors``: the values of the ``rope_*`` tensors present.
    """
    config: Config = {"torch_dtype": "float32", "vocab_size": tensors["token_embd.weight"][0]}
    config["tie_word_embeddings"] = "output.weight" not in tensors
    if meta.number("expert_count", 0):
        raise CheckpointError(
            f"{meta.path} is a mixture of experts ({meta.number('expert_count')} experts), "
            f"which Pelton does not support"
        )
    if meta.arch == "gpt2":
        return config | _gpt2(meta)
    config |= _common(meta)
    scaling = _rope_scaling(meta, config, factors)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config | _SPECIFIC[meta.arch](meta, config, tensors)


def _common(meta: Metadata) -> Config:
    hidden, heads = meta.count("embedding_length"), meta.count("attention.head_count")
    head_dim = meta.number("attention.key_length", 0)
    if not head_dim:
        head_dim = hidden // heads
        if meta.arch == "llama":
            head_dim = meta.count("rope.dimension_count", head_dim)
    if meta.number("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(
            f"{meta.path} has keys of {head_dim} and values of {meta.number('attention.value_length')} "
            f"per head; Pelton needs them equal"
        )
    rotary = meta.count("rope.dimension_count", head_dim)
    config = {
        "hidden_size": hidden,
        "intermediate_size": meta.count("feed_forward_length"),
        "num_hidden_layers": meta.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": meta.count("context_length"),
        "rms_norm_eps": meta.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.real("rope.freq_base", 10000.0),
        "hidden_act": "silu",
        "attention_bias": False,
    }
    if rotary != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    return config


def _llama(meta: Metadata, config: Config, tensors: Mapping[str, tuple[int, ...]]) -> Config:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }


def _qwen2(meta: Metadata, config: Config, tensors: Mapping[str, tuple[int, ...]]) -> Config:
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}


def _qwen3(meta: Metadata, config: Config, tensors: Mapping[str, tuple[int, ...]]) -> Config:
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": False}


def _gemma(meta: Metadata, config: Config, tensors: Mapping[str, tuple[int, ...]]) -> Config:
    return {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", **_GELU}


_GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(meta: Metadata, config: Config, tensors: Mapping[str, tuple[int, ...]]) -> Config:
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        **_GELU,
        "sliding_window": meta.number("attention.sliding_window", 4096),
        "layer_types": _layer_types(meta, period=2),
        "attn_logit_softcapping": meta.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": meta.real("final_logit_softcapping", 30.0),
        # The 27B model alone scales by hidden_size / heads.
        "query_pre_attn_scalar": _query_scalar(config, exception=config["num_hidden_layers"] == 46),
    }


def _gemma3(meta: Metadata, config: Config, tensors: Mapping[str, tuple[int, ...]]) -> Config:
    period = 6
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **_GELU,
        "sliding_window": meta.number("attention.sliding_window"),
        "sliding_window_pattern": period,
        "layer_types": _layer_types(meta, period),
        "rope_theta": meta.real("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": meta.real("rope.freq_base_swa", 10000.0),
        "attn_logit_softcapping": meta.real("attn_logit_softcapping", None),
        "final_logit_softcapping": meta.real("final_logit_softcapping", None),
        "query_pre_attn_scalar": _query_scalar(config, exception=config["num_hidden_layers"] == 62),
    }


def _query_scalar(config: Config, *, exception: bool) -> int:
    if exception:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _layer_types(meta: Metadata, period: int) -> list[str]:
    """Every ``period``-th layer sees everything, the others a window; a list in the file overrides."""
    layers = meta.count("block_count")
    pattern = meta.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, list):
        if len(pattern) != layers:
            raise CheckpointError(f"{meta.path} gives {len(pattern)} window flags for {layers} layers")
        sliding = [bool(flag) for flag in pattern]
    else:
        sliding = [(i + 1) % pattern != 0 for i in range(layers)]
    return ["sliding_attention" if s else "full_attention" for s in sliding]


def _phi3(meta: Metadata, config: Config, tensors: Mapping[str, tuple[int, ...]]) -> Config:
    specific: Config = {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "sliding_window": meta.number("attention.sliding_window", 0) or None,
        "resid_pdrop": 0.0,
    }
    original = meta.number("rope.scaling.original_context_length", 0)
    if original:
        specific["original_max_position_embeddings"] = original
    return specific


def _gpt2(meta: Metadata) -> Config:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": meta.count("block_count"),
        "n_embd": meta.count("embedding_length"),
        "n_head": meta.count("attention.head_count"),
        "n_inner": meta.count("feed_forward_length"),
        "n_positions": meta.count("context_length"),
        "n_ctx": meta.count("context_length"),
        "layer_norm_epsilon": meta.real("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


_SPECIFIC: dict[str, Callable[[Metadata, Config, Mapping[str, tuple[int, ...]]], Config]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
}


def _rope_scaling(
    meta: Metadata, config: Config, factors: Mapping[str, npt.NDArray[np.float32]]
) -> Config | None:
    """Hugging Face's ``rope_scaling`` dict, None for plain RoPE."""
    original = meta.number("rope.scaling.original_context_length", 0)
    if "rope_freqs.weight" in factors:
        return _from_frequency_factors(factors["rope_freqs.weight"], config, original)
    long, short = factors.get("rope_factors_long.weight"), factors.get("rope_factors_short.weight")
    if long is not None and short is not None:
        scaling: Config = {
            "rope_type": "longrope",
            "long_factor": long.tolist(),
            "short_factor": short.tolist(),
            "original_max_position_embeddings": original or config["max_position_embeddings"],
        }
        attention = meta.real("rope.scaling.attn_factor", None)
        return scaling | ({} if attention is None else {"attention_factor": attention})
    kind = meta.get("rope.scaling.type", "none")
    factor = meta.real("rope.scaling.factor", meta.real("rope.scale_linear", 1.0))
    if kind == "linear" or (kind == "none" and factor not in (0.0, 1.0)):
        return None if factor in (0.0, 1.0) else {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and factor > 0:
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original or config["max_position_embeddings"],
        }
        for hf in ("beta_fast", "beta_slow"):
            if (value := meta.real(f"rope.scaling.yarn_{hf}", None)) is not None:
                scaling[hf] = value
        if (value := meta.real("rope.scaling.attn_factor", None)) is not None:
            # llama.cpp's factor comes on top of YaRN's own, Hugging Face's replaces it.
            scaling["attention_factor"] = value * (1 + 0.1 * math.log(factor))
        return scaling
    if kind in ("none", "longrope"):
        return None
    raise CheckpointError(
        f"{meta.path} uses RoPE scaling {kind!r}, which Pelton does not know "
        f"(known: none, linear, yarn, longrope)"
    )


def _from_frequency_factors(factors: npt.NDArray[np.float32], config: Config, original: int) -> Config:
    """``rope_freqs.weight`` holds Llama 3's frequency divisors but not the four numbers they come
    from: try the published ones, else state the divisors themselves (longrope divides likewise)."""
    for context in (original, 8192):
        scaling = {
            "rope_type": "llama3",
            "factor": float(factors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": context,
        }
        if context and np.allclose(llama3_divisors(config, scaling), factors, rtol=1e-5):
            return scaling
    return {
        "rope_type": "longrope",
        "short_factor": factors.tolist(),
        "long_factor": factors.tolist(),
        "attention_factor": 1.0,
        "factor": 1.0,
        "original_max_position_embeddings": config["max_position_embeddings"],
    }


def llama3_divisors(config: Config, scaling: Mapping[str, Any]) -> npt.NDArray[np.float64]:
    """What Llama 3's RoPE scaling divides each frequency by, (head_dim / 2,)."""
    dim = int(config["head_dim"] * config.get("partial_rotary_factor", 1.0))
    frequency = config["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / scaling["factor"] + smooth))
