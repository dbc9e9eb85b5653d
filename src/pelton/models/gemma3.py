"""Gemma 3, text (Gemma Team, 2025): Gemma 2's network with q/k norms and two RoPE tables."""

from __future__ import annotations

from pelton.models.gemma2 import Gemma2Config, Gemma2ForCausalLM
from pelton.models.hf_config import HFConfig


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Five sliding layers, then a full one (``sliding_window_pattern``), unless ``layer_types``.

    Sliding layers rotate by ``rope_local_base_freq``, full ones by ``rope_theta`` and its scaling.
    """

    @classmethod
    def from_config(cls, hf: HFConfig, max_seq_len: int) -> Gemma3ForCausalLM:
        # Hugging Face reads this key but its attention does not apply it.
        hf.expect("attn_logit_softcapping", None)
        pattern = hf.integer("sliding_window_pattern", hf.integer("_sliding_window_pattern", 6))
        config = Gemma2Config.read(
            hf,
            max_seq_len,
            slides=[(layer + 1) % pattern != 0 for layer in range(hf.integer("num_hidden_layers"))],
            max_position_embeddings=hf.integer("max_position_embeddings", 131072),
            attention_softcap=0.0,
            logits_softcap=hf.get("final_logit_softcapping", 0.0),
            qk_norm=True,
            rope=hf.rope(layer_type="full_attention", default_theta=1e6),
            local_rope=hf.rope(
                layer_type="sliding_attention", default_theta=1e4, theta_key="rope_local_base_freq"
            ),
        )
        return cls(config)


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The language model of an image-and-text checkpoint; its vision tower is left out."""

    unused_tensors = (
        "vision_tower.*",
        "multi_modal_projector.*",
        "model.vision_tower.*",
        "model.multi_modal_projector.*",
    )

    @classmethod
    def from_config(cls, hf: HFConfig, max_seq_len: int) -> Gemma3ForConditionalGeneration:
        for key in _OF_IMAGES:
            hf.get(key)
        tied = hf.flag("tie_word_embeddings", True)
        text = hf.child("text_config", {**_TEXT_DEFAULTS, "tie_word_embeddings": tied})
        model = super().from_config(text, max_seq_len)
        assert isinstance(model, cls)
        return model

    def source_name(self, parameter_name: str) -> str:
        return f"language_model.{parameter_name}"


_OF_IMAGES = (
    "vision_config",
    "mm_tokens_per_image",
    "image_token_index",
    "boi_token_index",
    "eoi_token_index",
)
#: What the hub's files leave out of ``text_config`` because it is Hugging Face's default.
_TEXT_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
