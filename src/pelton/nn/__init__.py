"""PyTorch-like layers that run eagerly on the ops' references and are traced into an ``ir.Graph``.

Shape legend of tensor names: T tokens, B sequences, N logits rows, M block-table columns, D a row's
width, H heads, V vocabulary, R rotary dimensions.
"""

from pelton.nn.attention import Attention, AttentionInputs
from pelton.nn.causal_lm import CausalLM, KVLayout, LayerKV
from pelton.nn.layers import MLP, Embedding, GatedMLP, LayerNorm, Linear, RMSNorm
from pelton.nn.module import Module, collect_recipes, load_weights
from pelton.nn.rope import RotaryEmbedding, rope_frequencies

__all__ = [
    "MLP",
    "Attention",
    "AttentionInputs",
    "CausalLM",
    "Embedding",
    "GatedMLP",
    "KVLayout",
    "LayerKV",
    "LayerNorm",
    "Linear",
    "Module",
    "RMSNorm",
    "RotaryEmbedding",
    "collect_recipes",
    "load_weights",
    "rope_frequencies",
]
