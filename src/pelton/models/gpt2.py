"""GPT-2 (Radford et al., 2019): LayerNorm, learned positions, packed Conv1D projections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn import ModuleList

from pelton import nn
from pelton.errors import CheckpointError, ConfigError
from pelton.ir.recipe import Recipe, transpose
from pelton.models.hf_config import HFConfig
from pelton.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """Keys of GPT-2's ``config.json`` under the names other models use."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    activation: str
    max_position_embeddings: int
    tied: bool
    attention_scales: tuple[float, ...]
    """What multiplies q.k, of each layer."""

    @staticmethod
    def read(hf: HFConfig) -> GPT2Config:
        hidden_size, num_layers, num_heads = hf.integer("n_embd"), hf.integer("n_layer"), hf.integer("n_head")
        if hidden_size % num_heads:
            raise CheckpointError(f"config.json: n_embd {hidden_size} is no multiple of n_head {num_heads}")
        scale = (hidden_size // num_heads) ** -0.5 if hf.flag("scale_attn_weights", True) else 1.0
        by_layer = hf.flag("scale_attn_by_inverse_layer_idx", False)
        return GPT2Config(
            vocab_size=hf.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=hf.integer("n_inner", 4 * hidden_size),
            num_layers=num_layers,
            num_heads=num_heads,
            norm_eps=hf.number("layer_norm_epsilon", 1e-5),
            activation=hf.activation("activation_function", "gelu_new"),
            max_position_embeddings=hf.integer("n_positions", 1024),
            tied=hf.flag("tie_word_embeddings", True),
            attention_scales=tuple(scale / (i + 1 if by_layer else 1) for i in range(num_layers)),
        )


class Conv1D(nn.Linear):
    """A linear layer whose weight the checkpoint stores as (in, out)."""

    def recipe(self, param_name: str, source: Recipe) -> Recipe:
        return transpose(source) if param_name == "weight" else source


class GPT2Attention(nn.Attention):
    """``nn.Attention`` over Conv1D layers; the checkpoint calls them ``c_attn`` and ``c_proj``."""

    def __init__(self, c: GPT2Config, scale: float) -> None:
        super().__init__(
            hidden_size=c.hidden_size,
            num_heads=c.num_heads,
            num_kv_heads=c.num_heads,
            head_dim=c.hidden_size // c.num_heads,
            scale=scale,
            packed=True,
        )
        self.qkv_proj = Conv1D(c.hidden_size, 3 * c.hidden_size, bias=True)
        self.o_proj = Conv1D(c.hidden_size, c.hidden_size, bias=True)


class GPT2Block(nn.Module):
    """``x += attention(norm(x)); x += mlp(norm(x))``."""

    def __init__(self, c: GPT2Config, scale: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(c.hidden_size, eps=c.norm_eps)
        self.attn = GPT2Attention(c, scale)
        self.ln_2 = nn.LayerNorm(c.hidden_size, eps=c.norm_eps)
        self.mlp = nn.MLP(
            Conv1D(c.hidden_size, c.intermediate_size, bias=True),
            Conv1D(c.intermediate_size, c.hidden_size, bias=True),
            activation=c.activation,
        )

    def forward(self, x_TD: Any, k_cache: Any, v_cache: Any, inputs: nn.AttentionInputs) -> Any:
        x_TD = x_TD + self.attn(self.ln_1(x_TD), None, k_cache, v_cache, inputs)
        return x_TD + self.mlp(self.ln_2(x_TD))


class GPT2Model(nn.Module):
    """Token and position embeddings, blocks, final norm of the rows whose logits are wanted."""

    def __init__(self, c: GPT2Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(c.vocab_size, c.hidden_size)
        self.wpe = nn.Embedding(c.max_position_embeddings, c.hidden_size)
        self.h = ModuleList(GPT2Block(c, scale) for scale in c.attention_scales)
        self.ln_f = nn.LayerNorm(c.hidden_size, eps=c.norm_eps)

    def forward(
        self,
        input_ids_T: Any,
        positions_T: Any,
        k_caches: Sequence[Any],
        v_caches: Sequence[Any],
        inputs: Sequence[nn.AttentionInputs],
        logits_indices_N: Any,
    ) -> Any:
        """``inputs``: of each layer -> (N, D)."""
        x_TD = self.wte(input_ids_T) + self.wpe(positions_T)
        for block, k_cache, v_cache, layer_inputs in zip(self.h, k_caches, v_caches, inputs, strict=True):
            x_TD = block(x_TD, k_cache, v_cache, layer_inputs)
        return self.ln_f(F.take_rows(x_TD, logits_indices_N))


class GPT2LMHeadModel(nn.CausalLM):
    """Sequences end at ``n_positions``: learned positions have no further rows."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.num_layers = config.num_layers
        self.max_position_embeddings = config.max_position_embeddings
        self.transformer = GPT2Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        if config.tied:
            self.lm_head.weight = self.transformer.wte.weight

    @classmethod
    def from_config(cls, hf: HFConfig, max_seq_len: int) -> GPT2LMHeadModel:
        config = GPT2Config.read(hf)
        if max_seq_len > config.max_position_embeddings:
            raise ConfigError(
                f"max_seq_len {max_seq_len} exceeds the {config.max_position_embeddings} positions this "
                f"{hf.name} has learned; build with --max-seq-len {config.max_position_embeddings} or less"
            )
        return cls(config)

    def layer_kv(self) -> Sequence[nn.LayerKV]:
        c = self.config
        return [nn.LayerKV(c.num_heads, c.hidden_size // c.num_heads)] * c.num_layers

    def source_name(self, parameter_name: str) -> str:
        return parameter_name.replace(".attn.qkv_proj.", ".attn.c_attn.").replace(
            ".attn.o_proj.", ".attn.c_proj."
        )

    def forward(
        self,
        input_ids_T: Any,
        positions_T: Any,
        k_caches: Sequence[Any],
        v_caches: Sequence[Any],
        groups: Sequence[nn.AttentionInputs],
        logits_indices_N: Any,
    ) -> Any:
        inputs = [groups[g] for g in self.group_of_layer()]
        hidden_ND = self.transformer(input_ids_T, positions_T, k_caches, v_caches, inputs, logits_indices_N)
        return self.lm_head(hidden_ND)
